"""Hostile and damaged model files: mutations of JSON, tokenizers, GGUF and safetensors.

Each function yields changed files with labels that describe the change. The mutations depend on the
file only, so that a label always means the same bytes. The bytes are made on demand, because most
tests use a sample of the mutations.
"""

import json
import math
import random
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, NamedTuple

from gguf.constants import Keys


class Mutation(NamedTuple):
    """A changed file."""

    label: str  # what was changed
    make: Callable[[], bytes]  # returns the bytes of the file


LONG_TEXT = "A" * 5000
# Values of a JSON key, or elements of an array, that no model has there; some of them are valid in
# some places.
JSON_VALUES: tuple[Any, ...] = (
    None,
    True,
    False,
    0,
    -1,
    1,
    7,
    2**31 - 1,
    10**12,
    10**30,
    -(10**12),
    0.5,
    -0.5,
    1e-300,
    1e300,
    math.nan,
    math.inf,
    "",
    "x",
    LONG_TEXT,
    "../../etc/passwd",
    "a\0b",
    "\ud800",
    [],
    [None],
    [0],
    [0, 0, 0],
    [-1, 10**12, 0.5],
    ["x", "x", "x"],
    [[[]]],
    [{}, {}, {}],
    {},
    {"x": None},
    {"x": {"x": [1]}},
    {"0": 10**12},
)


def nested_list(depth: int) -> Any:
    """Return a list in a list in a list …."""
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


def json_values(document: Mapping[str, Any], extra_keys: Sequence[str] = ()) -> Iterator[Mutation]:
    """Yield a document with each value replaced by each hostile one, and with each key removed.

    Further mutations add each of ``extra_keys`` with each hostile value.
    """
    values = [(f"{value!r:.30}", value) for value in JSON_VALUES]
    for path in _paths(document):
        where = ".".join(map(str, path))
        yield Mutation(f"{where} missing", partial(_dump, _without(document, path)))
        for label, value in (*values, ("[" * 30, nested_list(200))):
            yield Mutation(f"{where} = {label}", partial(_dump_with, document, path, value))
    for key in extra_keys:
        for label, value in values:
            yield Mutation(f"{key} added: {label}", partial(_dump_with, document, (key,), value))


def json_texts(document: Mapping[str, Any]) -> Iterator[Mutation]:
    """Yield damaged texts of a document: cut, encoded otherwise, with duplicate keys, too deep."""
    text = _dump(document)
    for place in [index for index, byte in enumerate(text) if chr(byte) in '{}[]:,"']:
        yield Mutation(f"truncated after {place} bytes", partial(bytes, text[:place]))
    for name, content in {
        "empty": b"",
        "BOM": b"\xef\xbb\xbf" + text,
        "UTF-16": text.decode().encode("utf-16"),
        "not UTF-8": text.replace(b'"', b'"\xff', 1),
        "not UTF-8 value": text.replace(b': "', b': "\xc3', 1),
        "a zero byte": text.replace(b",", b"\0,", 1),
        "null": b"null",
        "list": b"[]",
        "number": b"1",
        "string": b'"x"',
        "deep list": b"[" * 100_000,
        "deep object": b'{"a":' * 100_000,
        "long number": b'{"vocab_size": ' + b"9" * 10_000 + b"}",
        "text after the end": text + b"}",
        "zero bytes": bytes(len(text)),
    }.items():
        yield Mutation(name, partial(bytes, content))
    for key in document:
        for depth in (150, *range(900, 1000, 10)):
            deep = (
                b"{"
                + json.dumps(key).encode()
                + b":"
                + b"[" * depth
                + b"]" * depth
                + b","
                + text[1:]
            )
            yield Mutation(f"{key} twice, first {depth} lists", partial(bytes, deep))
            deep = (
                text[:-1]
                + b","
                + json.dumps(key).encode()
                + b":"
                + b"[" * depth
                + b"]" * depth
                + b"}"
            )
            yield Mutation(f"{key} of {depth} lists", partial(bytes, deep))
        for value in (None, -1, "x", {}, []):
            twice = b"{" + json.dumps({key: value}).encode()[1:-1] + b"," + text[1:]
            yield Mutation(f"{key} twice, first {value!r}", partial(bytes, twice))
            twice = text[:-1] + b"," + json.dumps({key: value}).encode()[1:]
            yield Mutation(f"{key} twice, last {value!r}", partial(bytes, twice))


_EXPRESSIONS = (
    "",
    "(",
    "l",
    "l*l*x",
    r"\s+$",
    "(l+)+x",
    "(?<=l)(l|l)*x",
    "((l{1,1000}){1,1000}){1,1000}",
    "(" * 5000 + "l" + ")" * 5000,
)
_LONG_COPY = "l" * 100


def _sequence(kind: str, members: Sequence[Any]) -> dict[str, Any]:
    return {"type": "Sequence", kind: [*members]}


def _nested(kind: str, member: Any, depth: int) -> Any:
    for _ in range(depth):
        member = _sequence(kind, [member])
    return member


def _replacements() -> Iterator[dict[str, Any]]:
    """Yield components of normalizers and decoders that replace texts."""
    for expression in _EXPRESSIONS:
        for content in ("", "y", _LONG_COPY):
            yield {"type": "Replace", "pattern": {"Regex": expression}, "content": content}
    for text, content in (
        ("", ""),
        ("", "ab"),
        ("l", _LONG_COPY),
        (" ", "\u2581"),
        ("\u2581", " "),
    ):
        yield {"type": "Replace", "pattern": {"String": text}, "content": content}


def _templates() -> Iterator[dict[str, Any]]:
    text = {"Sequence": {"id": "A", "type_id": 0}}
    token = {"SpecialToken": {"id": "x", "type_id": 0}}
    defined = {"x": {"id": "x", "ids": [0], "tokens": ["x"]}}
    for count in (1, 20, 10_000):
        for tokens in (
            {},
            defined,
            {"x": {**defined["x"], "ids": [0] * 7}},
            {"x": {**defined["x"], "ids": [10**9]}},
        ):
            for single in ([text, *[token] * count], [text] * count, [token] * count):
                yield {
                    "type": "TemplateProcessing",
                    "single": single,
                    "pair": single,
                    "special_tokens": tokens,
                }


def _tokenizer_parts() -> Iterator[tuple[str, Any]]:
    """Yield the names of stages of a tokenizer, and components that are hostile or odd."""
    replacing = [*_replacements()]
    for stage, members in (("normalizer", "normalizers"), ("decoder", "decoders")):
        for part in replacing:
            yield stage, part
            yield stage, _sequence(members, [part] * 6)
        yield stage, _nested(members, {"type": "NFC" if stage == "normalizer" else "Fuse"}, 40)
        yield (
            stage,
            _sequence(members, [{"type": "NFC" if stage == "normalizer" else "Fuse"}] * 5000),
        )
    for table in ("", "AAAA", "EAAAAP///////////////////2FiYwA=", "////fw=="):
        yield "normalizer", {"type": "Precompiled", "precompiled_charsmap": table}
    yield "normalizer", _sequence("normalizers", [{"type": "Prepend", "prepend": "l" * 10**5}] * 20)
    for start, stop in ((0, 1), (1, 1), (10**12, 0), (0, 10**12), (2**64 - 1, 2**64 - 1)):
        yield "decoder", {"type": "Strip", "content": "l", "start": start, "stop": stop}
    yield "decoder", {"type": "CTC", "pad_token": "", "word_delimiter_token": "", "cleanup": True}
    yield "decoder", {"type": "BPEDecoder", "suffix": ""}
    yield "decoder", {"type": "WordPiece", "prefix": "", "cleanup": True}
    for expression in _EXPRESSIONS:
        for behavior in ("Isolated", "Removed", "MergedWithPrevious", "Contiguous"):
            split = {
                "type": "Split",
                "pattern": {"Regex": expression},
                "behavior": behavior,
                "invert": False,
            }
            yield "pre_tokenizer", split
        yield "pre_tokenizer", _sequence("pretokenizers", [split] * 300)
    for length in (0, 1, 10**12):
        yield "pre_tokenizer", {"type": "FixedLength", "length": length}
    yield (
        "pre_tokenizer",
        {"type": "Split", "pattern": {"String": ""}, "behavior": "Isolated", "invert": False},
    )
    yield (
        "pre_tokenizer",
        _nested("pretokenizers", {"type": "Digits", "individual_digits": True}, 40),
    )
    for template in _templates():
        yield "post_processor", template
        yield "post_processor", _sequence("processors", [template] * 3)


def _tokenizer_models() -> Iterator[dict[str, Any]]:
    bpe = {
        "type": "BPE",
        "vocab": {"a": 0, "l": 1, "ll": 2, "é": 3, "漢": 4},
        "merges": [["l", "l"]],
    }
    for prefix in ("##", "é", "l", LONG_TEXT):
        for key in ("continuing_subword_prefix", "end_of_word_suffix"):
            yield {**bpe, key: prefix}
            yield {**bpe, key: prefix, "merges": [["a", "漢"]]}
    for unknown in (None, "a", "absent"):
        yield {**bpe, "unk_token": unknown, "byte_fallback": True, "fuse_unk": True}
    runs = [["l" * length, -1.0] for length in range(1, 1500)]
    for number in (0, 5, 10**6, None):
        yield {"type": "Unigram", "unk_id": number, "vocab": runs, "byte_fallback": number == 0}
        yield {
            "type": "Unigram",
            "unk_id": number,
            "vocab": [["", 0.0], ["l", -1e308], ["ll", 1e308]],
        }
    for size in (0, 1, 10**12):
        words = {"[UNK]": 0, "l": 1, "##l": 2}
        for prefix in ("##", "", "é"):
            piece = {
                "unk_token": "[UNK]",
                "continuing_subword_prefix": prefix,
                "max_input_chars_per_word": size,
            }
            yield {"type": "WordPiece", "vocab": words, **piece}
    yield {"type": "WordLevel", "vocab": {"l": 2**32 - 1}, "unk_token": "absent"}


def _added_tokens() -> Iterator[list[dict[str, Any]]]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), True)
    for content in ("", "l", " ", "\n", LONG_TEXT):
        for number in (0, 10**6, 2**32 - 1):
            yield [{"id": number, "content": content, **flags}]
    yield [{"id": number, "content": f"<{number}>", **flags} for number in range(50_000)]
    yield [{"id": number, "content": "l" * number, **flags} for number in range(1, 3000)]


def tokenizer_files(document: Mapping[str, Any]) -> Iterator[Mutation]:
    """Yield a ``tokenizer.json`` with hostile stages, models and added tokens."""
    for label, stage, part in _labelled_parts():
        yield Mutation(label, partial(_dump, {**document, stage: part}))


@cache
def _labelled_parts() -> list[tuple[str, str, Any]]:
    """Return hostile parts of a tokenizer, with labels: their texts have millions of characters."""
    parts = [
        *_tokenizer_parts(),
        *(("model", model) for model in _tokenizer_models()),
        *(("added_tokens", tokens) for tokens in _added_tokens()),
    ]
    return [
        (f"{stage} {number}: {part!r:.60}", stage, part)
        for number, (stage, part) in enumerate(parts)
    ]


def binary_files(content: bytes) -> Iterator[Mutation]:
    """Yield a binary file cut, extended, and with changed bytes, most of them at its beginning."""
    for size in (0, 1, 7, 100, len(content) // 2, len(content) - 1):
        yield Mutation(f"truncated after {size} bytes", partial(bytes, content[:size]))
    yield Mutation("a byte too many", partial(bytes, content + b"\0"))
    yield Mutation("twice", partial(bytes, content * 2))
    for byte in (b"\0", b"\xff", b"\x7f"):
        yield Mutation(f"only {byte!r}", partial(bytes, byte * len(content)))
    dice = random.Random(0)
    for number in range(200):
        changed = bytearray(content)
        for _ in range(dice.randint(1, 8)):
            limit = dice.choice((100, 4096, len(content)))
            changed[dice.randrange(min(limit, len(content)))] = dice.randrange(256)
        yield Mutation(f"changed bytes {number}", partial(bytes, changed))


def _dump(document: Any) -> bytes:
    return json.dumps(document).encode()


def _paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the paths of all values in a document; only two elements of a list."""
    if isinstance(value, Mapping):
        items: list[tuple[Any, Any]] = list(value.items())
    elif isinstance(value, list):
        items = [*enumerate(value)][:2]
    else:
        return
    for key, inner in items:
        yield (*path, key)
        yield from _paths(inner, (*path, key))


def _dump_with(document: Any, path: tuple[Any, ...], value: Any) -> bytes:
    return _dump(_with(document, path, value))


def _with(document: Any, path: tuple[Any, ...], value: Any) -> Any:
    if not path:
        return value
    copied = dict(document) if isinstance(document, Mapping) else list(document)
    copied[path[0]] = _with(document[path[0]], path[1:], value) if path[1:] else value
    return copied


def _without(document: Any, path: tuple[Any, ...]) -> Any:
    copied = dict(document) if isinstance(document, Mapping) else list(document)
    if len(path) == 1:
        del copied[path[0]]
    else:
        copied[path[0]] = _without(document[path[0]], path[1:])
    return copied


# GGUF types of metadata values: number and struct format of the scalars.
_SCALARS = dict(enumerate("BbHhIif?")) | {10: "Q", 11: "q", 12: "d"}
_STRING = 8
_ARRAY = 9
_HUGE = (2**32, 2**40, 2**62, 2**63, 2**64 - 1)


@dataclass(frozen=True)
class GgufPair:
    """A pair of metadata: the key, the number of the type, and the bytes of the value."""

    key: bytes
    type: int
    value: bytes

    def to_bytes(self) -> bytes:
        """Return the bytes in the file."""
        return _string(self.key) + struct.pack("<I", self.type) + self.value


@dataclass(frozen=True)
class GgufTensor:
    """The description of a tensor."""

    name: bytes
    shape: tuple[int, ...]
    type: int
    offset: int
    num_dimensions: int | None = None  # the announced number; ``None``: that of ``shape``

    def to_bytes(self) -> bytes:
        """Return the bytes in the file."""
        count = len(self.shape) if self.num_dimensions is None else self.num_dimensions
        sizes = struct.pack(f"<{len(self.shape)}Q", *self.shape)
        return (
            _string(self.name)
            + struct.pack("<I", count)
            + sizes
            + struct.pack("<IQ", self.type, self.offset)
        )


@dataclass(frozen=True)
class GgufImage:
    """The parts of a GGUF file."""

    pairs: tuple[GgufPair, ...]
    tensors: tuple[GgufTensor, ...]
    data: bytes
    magic: bytes = b"GGUF"
    version: int = 3
    num_tensors: int | None = None  # the announced number; ``None``: that of ``tensors``
    num_pairs: int | None = None

    def to_bytes(self) -> bytes:
        """Return the bytes of the file."""
        head, _ = self._header()
        return head + bytes(-len(head) % 32) + self.data

    def borders(self) -> list[int]:
        """Return the offsets of the ends of all pairs and descriptions, and that of the data."""
        head, ends = self._header()
        return [0, 3, 4, 8, 16, 23, *ends, len(head) + -len(head) % 32]

    def _header(self) -> tuple[bytes, list[int]]:
        num_tensors = len(self.tensors) if self.num_tensors is None else self.num_tensors
        num_pairs = len(self.pairs) if self.num_pairs is None else self.num_pairs
        head = self.magic + struct.pack("<IQQ", self.version, num_tensors, num_pairs)
        ends = []
        for part in (*self.pairs, *self.tensors):
            head += part.to_bytes()
            ends.append(len(head))
        return head, ends


def read_gguf(content: bytes) -> GgufImage:
    """Return the parts of an undamaged GGUF file."""
    position = 0

    def take(size: int) -> bytes:
        nonlocal position
        position += size
        return content[position - size : position]

    def number(kind: str) -> int:
        return int(struct.unpack(f"<{kind}", take(struct.calcsize(kind)))[0])

    def value_size(kind: int) -> int:
        if kind == _STRING:
            return 8 + int(struct.unpack_from("<Q", content, position)[0])
        return struct.calcsize(_SCALARS[kind])

    def value(kind: int) -> bytes:
        if kind != _ARRAY:
            return take(value_size(kind))
        start = position
        inner = number("I")
        count = number("Q")
        for _ in range(count):
            take(value_size(inner))
        return content[start:position]

    take(8)
    num_tensors = number("Q")
    num_pairs = number("Q")
    pairs = []
    for _ in range(num_pairs):
        key = take(number("Q"))
        kind = number("I")
        pairs.append(GgufPair(key, kind, value(kind)))
    tensors = []
    for _ in range(num_tensors):
        name = take(number("Q"))
        count = number("I")
        shape = tuple(number("Q") for _ in range(count))
        tensors.append(GgufTensor(name, shape, number("I"), number("Q")))
    return GgufImage(tuple(pairs), tuple(tensors), content[position + -position % 32 :])


def split_gguf(image: GgufImage) -> tuple[GgufImage, GgufImage]:
    """Return two parts of a model, each with half of the tensors."""
    half = len(image.tensors) // 2
    border = image.tensors[half].offset
    first = image.tensors[:half]
    second = image.tensors[half:]
    moved = tuple(replace(tensor, offset=tensor.offset - border) for tensor in second)
    parts = []
    for number, tensors, data in ((0, first, image.data[:border]), (1, moved, image.data[border:])):
        shared = image.pairs if number == 0 else ()
        pairs = (
            GgufPair(b"split.no", 2, struct.pack("<H", number)),
            GgufPair(b"split.count", 2, struct.pack("<H", 2)),
            GgufPair(b"split.tensors.count", 5, struct.pack("<i", len(image.tensors))),
        )
        parts.append(replace(image, pairs=(*shared, *pairs), tensors=tensors, data=data))
    return parts[0], parts[1]


def with_sentencepiece(image: GgufImage) -> GgufImage:
    """Return a model with the vocabulary of a SentencePiece BPE, of the same size."""
    old = {pair.key: pair for pair in image.pairs}
    count = struct.unpack_from("<Q", old[b"tokenizer.ggml.tokens"].value, 4)[0]
    texts = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "\u2581",
        "l",
        "ll",
        "\u2581l",
    ]
    texts += [f"[PAD{number}]" for number in range(len(texts), count)]
    kinds = [2, 3, 3, *[6] * 256, *[1] * (count - 259)]
    values = {
        b"tokenizer.ggml.model": (_STRING, _string(b"llama")),
        b"tokenizer.ggml.tokens": (
            _ARRAY,
            _array(_STRING, [_string(text.encode()) for text in texts]),
        ),
        b"tokenizer.ggml.token_type": (
            _ARRAY,
            _array(5, [struct.pack("<i", kind) for kind in kinds]),
        ),
        b"tokenizer.ggml.scores": (
            _ARRAY,
            _array(6, [struct.pack("<f", -number) for number in range(count)]),
        ),
        b"tokenizer.ggml.unknown_token_id": (4, struct.pack("<I", 0)),
        b"tokenizer.ggml.bos_token_id": (4, struct.pack("<I", 1)),
        b"tokenizer.ggml.eos_token_id": (4, struct.pack("<I", 2)),
    }
    kept = tuple(pair for pair in image.pairs if not pair.key.startswith(b"tokenizer."))
    return replace(
        image, pairs=(*kept, *(GgufPair(key, kind, value) for key, (kind, value) in values.items()))
    )


def _string(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


def _array(kind: int, elements: Sequence[bytes], length: int | None = None) -> bytes:
    count = len(elements) if length is None else length
    return struct.pack("<IQ", kind, count) + b"".join(elements)


@cache
def _gguf_values() -> list[tuple[str, int, bytes]]:
    """Return hostile values of metadata: a label, the number of the type, and the bytes."""
    return [*_make_gguf_values()]


def _make_gguf_values() -> Iterator[tuple[str, int, bytes]]:
    for kind, letter in _SCALARS.items():
        size = struct.calcsize(letter)
        if letter in "fd":
            numbers = [
                struct.pack(f"<{letter}", each)
                for each in (0, -1, 0.5, math.nan, math.inf, -math.inf)
            ]
        else:
            numbers = [
                bytes(size),
                b"\x01" + bytes(size - 1),
                b"\xff" * size,
                b"\xff" * (size - 1) + b"\x7f",
            ]
        for each in numbers:
            yield f"{letter} {each.hex()}", kind, each
        yield f"array of three {letter}", _ARRAY, _array(kind, [numbers[0], numbers[1], numbers[2]])
    for name, text in {
        "empty": b"",
        "x": b"x",
        "long": b"A" * 5000,
        "not UTF-8": b"\xff\xfe",
        "zero byte": b"a\0b",
        "template": b"{{ 1 / 0 }}",
    }.items():
        yield f"{name} string", _STRING, _string(text)
        yield f"array of an {name} string", _ARRAY, _array(_STRING, [_string(text)])
    for length in _HUGE:
        yield f"string of {length} bytes", _STRING, struct.pack("<Q", length)
        yield f"array of {length} strings", _ARRAY, _array(_STRING, [], length)
        yield f"array of {length} int8", _ARRAY, _array(1, [], length)
        yield f"array of {length} float64", _ARRAY, _array(12, [], length)
    for kind in (4, 6, 7, _STRING):
        yield f"empty array of type {kind}", _ARRAY, _array(kind, [])
    yield "array of arrays", _ARRAY, _array(_ARRAY, [_array(4, [bytes(4)])])
    yield "array of an unknown type", _ARRAY, _array(77, [bytes(4)])
    yield "unknown type", 13, bytes(8)
    yield "huge type", 2**32 - 1, bytes(8)


def gguf_metadata(image: GgufImage) -> Iterator[Mutation]:
    """Yield a GGUF file with each pair of metadata changed, removed, repeated, or with new keys."""
    for index, pair in enumerate(image.pairs):
        for label, changed in _changed_pairs(pair):
            pairs = (*image.pairs[:index], *changed, *image.pairs[index + 1 :])
            yield Mutation(f"{pair.key.decode()}: {label}", replace(image, pairs=pairs).to_bytes)
    known = {pair.key.decode(): pair.value for pair in image.pairs}
    architecture = (
        known["general.architecture"][8:].decode() if "general.architecture" in known else "llama"
    )
    for key in _known_keys(architecture):
        if key not in known:
            for label, kind, value in _gguf_values():
                pairs = (*image.pairs, GgufPair(key.encode(), kind, value))
                yield Mutation(f"{key} added: {label}", replace(image, pairs=pairs).to_bytes)


def _changed_pairs(pair: GgufPair) -> Iterator[tuple[str, tuple[GgufPair, ...]]]:
    """Yield the pairs that replace a pair of metadata, with labels."""
    yield "missing", ()
    yield "twice", (pair, pair)
    for label, kind, value in _gguf_values():
        yield label, (replace(pair, type=kind, value=value),)
    for kind in (*_SCALARS, _STRING, _ARRAY, 13):
        yield f"type {kind}, same bytes", (replace(pair, type=kind),)
    for label, key in _names(pair.key):
        yield label, (replace(pair, key=key),)
    if pair.type != _ARRAY:
        return
    kind, count = struct.unpack_from("<IQ", pair.value)
    for length in (0, 1, count - 1, count + 1, *_HUGE):
        value = struct.pack("<IQ", kind, length) + pair.value[12:]
        yield f"{length} elements", (replace(pair, value=value),)
    for other in (*_SCALARS, _STRING, _ARRAY, 13):
        value = struct.pack("<I", other) + pair.value[4:]
        yield f"elements of type {other}", (replace(pair, value=value),)
    if count == 0:
        return
    for label, elements in _changed_elements(kind, pair.value[12:], count):
        yield label, (replace(pair, value=_array(kind, elements)),)


def _changed_elements(kind: int, content: bytes, count: int) -> Iterator[tuple[str, list[bytes]]]:
    """Yield other elements of the same type for an array of metadata, with labels."""
    if kind == _STRING:
        elements = _split_strings(content, count)
        hostile = [_string(text) for text in (b"", b" ", b"a b c", b"\xff", b"\0", b"l" * 5000)]
        yield "runs of l", [_string(b"l" * length) for length in range(1, count + 1)]
        yield "20,000 elements", [elements[number % count] for number in range(20_000)]
    else:
        letter = _SCALARS[kind]
        size = struct.calcsize(letter)
        elements = [content[start : start + size] for start in range(0, count * size, size)]
        hostile = [bytes(size), b"\x01" + bytes(size - 1), b"\xff" * size]
        if letter in "fd":
            hostile = [struct.pack(f"<{letter}", each) for each in (-1, math.nan, math.inf)]
    yield "reversed elements", elements[::-1]
    for number in (0, count - 1):
        yield f"all elements like number {number}", [elements[number]] * count
    for number, element in enumerate(hostile):
        yield f"hostile element {number} first", [element, *elements[1:]]
        yield f"hostile element {number} everywhere", [element] * count


def _split_strings(content: bytes, count: int) -> list[bytes]:
    """Return the strings of an array, each with its length in front."""
    found = list[bytes]()
    for _ in range(count):
        (size,) = struct.unpack_from("<Q", content)
        found.append(content[: 8 + size])
        content = content[8 + size :]
    return found


def _known_keys(architecture: str) -> list[str]:
    """Return the metadata keys of models that the package ``gguf`` knows."""
    groups = [group for group in vars(Keys).values() if isinstance(group, type)]
    texts = [key for group in groups for key in vars(group).values() if isinstance(key, str)]
    found = [key.replace("{arch}", architecture) for key in texts]
    prefixes = (f"{architecture}.", "general.", "tokenizer.ggml.", "split.")
    return [key for key in dict.fromkeys(found) if key.startswith(prefixes) and "{" not in key]


def _names(name: bytes) -> Iterator[tuple[str, bytes]]:
    yield "empty name", b""
    yield "long name", b"A" * 70_000
    yield "name of 5,000 characters", name + b"x" * 5000
    yield "name that is not UTF-8", name + b"\xff"
    yield "name with a zero byte", name + b"\0"
    yield "name with a line break", name + b"\n"
    yield "other name", name + b"x"


def gguf_tensors(image: GgufImage) -> Iterator[Mutation]:
    """Change name, shape, type and offset of each tensor, remove it, and repeat it."""
    for index, tensor in enumerate(image.tensors):
        name = tensor.name.decode()

        def put(*tensors: GgufTensor, index: int = index) -> Callable[[], bytes]:
            changed = (*image.tensors[:index], *tensors, *image.tensors[index + 1 :])
            return replace(image, tensors=changed).to_bytes

        yield Mutation(f"{name} missing", put())
        yield Mutation(f"{name} twice", put(tensor, tensor))
        for label, changed in _names(tensor.name):
            yield Mutation(f"{name}: {label}", put(replace(tensor, name=changed)))
        for kind in (*range(42), 2**32 - 1):
            yield Mutation(f"{name}: type {kind}", put(replace(tensor, type=kind)))
        for offset in (1, 16, 32, 64, len(image.data), len(image.data) - 32, *_HUGE, 2**64 - 32):
            yield Mutation(f"{name}: offset {offset}", put(replace(tensor, offset=offset)))
        for shape in _shapes(tensor.shape):
            yield Mutation(f"{name}: shape {shape}", put(replace(tensor, shape=shape)))
        for count in (0, 1, 2, 3, 4, 5, 2**16, 2**32 - 1):
            yield Mutation(
                f"{name}: {count} dimensions announced", put(replace(tensor, num_dimensions=count))
            )


def _shapes(shape: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    yield shape[::-1]
    yield ()
    yield (*shape, 1)
    yield (1, *shape)
    yield (*shape, 1, 1)
    yield (2,) * 5
    yield (math.prod(shape),)
    for axis in range(len(shape)):
        for size in (0, 1, 31, 32, shape[axis] + 1, shape[axis] * 2, shape[axis] // 2, *_HUGE):
            yield (*shape[:axis], size, *shape[axis + 1 :])


def gguf_files(image: GgufImage) -> Iterator[Mutation]:
    """Yield a GGUF file with changed header fields or data, or cut at the borders of its parts."""
    content = image.to_bytes()
    for magic in (b"GGML", b"gguf", b"FUGG", bytes(4), b"PK\3\4"):
        yield Mutation(f"magic {magic!r}", replace(image, magic=magic).to_bytes)
    for version in (0, 1, 2, 4, 3 << 24, 2 << 24, 2**32 - 1):
        yield Mutation(f"version {version}", replace(image, version=version).to_bytes)
    for field, count in (("num_tensors", len(image.tensors)), ("num_pairs", len(image.pairs))):
        for number in (0, 1, count - 1, count + 1, count + 50, 10**6, *_HUGE):
            changed: dict[str, Any] = {field: number}
            yield Mutation(f"{field} = {number}", replace(image, **changed).to_bytes)
    for border in image.borders():
        for place in (border - 1, border, border + 1, border + 7):
            yield Mutation(
                f"truncated after {place} bytes", partial(bytes, content[: max(0, place)])
            )
    for share in (0.1, 0.5, 0.9, 0.99):
        yield Mutation(
            f"{share} of the data",
            replace(image, data=image.data[: int(share * len(image.data))]).to_bytes,
        )
    yield Mutation("data of ones", replace(image, data=b"\xff" * len(image.data)).to_bytes)
    yield Mutation("data of zeros", replace(image, data=bytes(len(image.data))).to_bytes)
    yield Mutation("data of huge numbers", replace(image, data=b"\x7f" * len(image.data)).to_bytes)
    yield Mutation("no tensors", replace(image, tensors=()).to_bytes)
    yield Mutation("no metadata", replace(image, pairs=()).to_bytes)
    yield Mutation("tensors in reverse", replace(image, tensors=image.tensors[::-1]).to_bytes)


def safetensors_files(content: bytes) -> Iterator[Mutation]:
    """Change the length of the header, the header's entries and its text, and the data."""
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    data = content[8 + length :]

    text = _dump(header)

    def with_header(make: Callable[[], bytes]) -> Callable[[], bytes]:
        return lambda: _join_safetensors(make(), data)

    for announced in (0, 1, len(text) - 1, len(text) + 1, len(content), 10**8, *_HUGE):
        yield Mutation(
            f"header of {announced} bytes", partial(_join_safetensors, text, data, announced)
        )
    for size in (0, 1, 7, 8, 9, 8 + length // 2, 8 + length, 9 + length, len(content) - 1):
        yield Mutation(f"truncated after {size} bytes", partial(bytes, content[:size]))
    yield Mutation("a byte too many", partial(bytes, content + b"\0"))
    for byte in (b"\0", b"\xff", b"\x7f"):
        yield Mutation(f"data of {byte!r}", partial(_join_safetensors, text, byte * len(data)))
    for mutation in (*json_texts(header), *json_values(header)):
        yield Mutation(f"header: {mutation.label}", with_header(mutation.make))
    for name in header.keys() - {"__metadata__"}:
        for label, changed in _safetensors_entries(name, header, len(data)):
            yield Mutation(f"{name}: {label}", with_header(partial(_dump, changed)))
        twice = text[:-1] + b"," + _dump({name: header[name]})[1:]
        yield Mutation(f"{name} twice", partial(_join_safetensors, twice, data))
    for value in JSON_VALUES:
        for metadata in (value, {"x": value}):
            changed = {**header, "__metadata__": metadata}
            yield Mutation(f"metadata {metadata!r:.30}", with_header(partial(_dump, changed)))


def _join_safetensors(header: bytes, data: bytes, announced: int | None = None) -> bytes:
    """Return the bytes of a safetensors file.

    ``announced`` is the length of the header that the file states; by default the true length.
    """
    size = len(header) if announced is None else announced
    return struct.pack("<Q", size) + header + data


def _safetensors_entries(
    name: str, header: Mapping[str, Any], total: int
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield headers with a changed entry of a tensor, with labels.

    ``total`` is the number of bytes of the file's data.
    """
    entry = header[name]
    begin, end = entry["data_offsets"]
    for offsets in (
        (0, end),
        (begin, total),
        (end, begin),
        (begin - 4, end - 4),
        (begin, end - 4),
        (0, 0),
    ):
        yield f"offsets {offsets}", {**header, name: {**entry, "data_offsets": offsets}}
    for (
        dtype
    ) in "F64 F32 F16 BF16 F8_E4M3 F8_E5M2 I64 I32 I16 I8 U64 U32 U16 U8 BOOL F4 C64 f32".split():
        yield dtype, {**header, name: {**entry, "dtype": dtype}}
    for shape in _shapes(tuple(entry["shape"])):
        yield f"shape {shape}", {**header, name: {**entry, "shape": shape}}
    for label, renamed in _names(name.encode()):
        new_name = renamed.decode(errors="replace")
        yield label, {(new_name if key == name else key): each for key, each in header.items()}
