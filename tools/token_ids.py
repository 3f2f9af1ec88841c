"""Compare the token ids of GGUF files with those of llama.cpp and of original tokenizers.

    python tools/token_ids.py MODEL.gguf --library libllama.so
    python tools/token_ids.py MODEL.gguf --original tokenizer.json
    python tools/token_ids.py MODEL.gguf --original tekken.json   # needs mistral-common

The texts are the 5,000 of ``tests/hard_texts.py``. The vocabulary alone is read, so a file without
weights suffices, such as ``models/ggml-vocab-*.gguf`` of llama.cpp's source. The last line is a
JSON document: for each oracle, the number of texts with other ids by category, and the digest of
its ids. ``docs/families.md`` names the files and the packages with original tokenizers that were
compared; their digests are in ``tests/text/token_ids.json``.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import tokenizers

from pronk.text.tokenizer import Tokenizer

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from hard_texts import corpus_digest, hard_texts, ids_digest

Encode = Callable[[str], list[int]]
_MAX_TOKENS = 20_000  # more than the longest text has bytes


class _ModelParams(ctypes.Structure):
    """``llama_model_params`` of llama.h, release b11434."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("devices", "buffer_overrides")),
        *((name, ctypes.c_int) for name in ("gpu_layers", "split", "load", "lazy", "main_gpu")),
        *((name, ctypes.c_void_p) for name in ("tensor_split", "callback", "data", "overrides")),
        *((name, ctypes.c_bool) for name in ("vocab_only", "check", "extra", "no_host")),
        *((name, ctypes.c_bool) for name in ("no_alloc", "load_mtp")),
    )


def load_llama_cpp(library: Path, model: Path) -> Encode:
    """Return llama.cpp's tokenizer of a GGUF file, which finds special tokens in a text."""
    llama = ctypes.CDLL(str(library))
    llama.llama_model_default_params.restype = _ModelParams
    llama.llama_model_load_from_file.argtypes = [ctypes.c_char_p, _ModelParams]
    llama.llama_model_load_from_file.restype = ctypes.c_void_p
    llama.llama_model_get_vocab.argtypes = [ctypes.c_void_p]
    llama.llama_model_get_vocab.restype = ctypes.c_void_p
    llama.llama_backend_init()
    params = llama.llama_model_default_params()
    params.vocab_only = True
    loaded = llama.llama_model_load_from_file(str(model).encode(), params)
    if loaded is None:
        sys.exit(f"{model}: llama.cpp cannot read this file")
    vocabulary = ctypes.c_void_p(llama.llama_model_get_vocab(loaded))
    buffer = (ctypes.c_int32 * _MAX_TOKENS)()

    def encode(text: str) -> list[int]:
        data = text.encode()
        count = llama.llama_tokenize(
            vocabulary,
            data,
            len(data),
            buffer,
            _MAX_TOKENS,
            ctypes.c_bool(False),
            ctypes.c_bool(True),
        )
        return buffer[:count]

    return encode


def load_original(file: Path) -> Encode:
    """Return the tokenizer of a ``tokenizer.json``, or of Mistral's ``tekken*.json``."""
    if file.name.startswith("tekken"):
        from mistral_common.tokens.tokenizers.tekken import Tekkenizer  # noqa: PLC0415

        tekken = Tekkenizer.from_file(file)
        return lambda text: list(tekken.encode(text, bos=False, eos=False))
    backend = tokenizers.Tokenizer.from_file(str(file))
    return lambda text: list(backend.encode(text, add_special_tokens=False).ids)


def main() -> None:
    """Print the texts with other ids, at most five for each oracle, and the numbers of all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--library", type=Path, help="libllama.so, release b11434")
    parser.add_argument("--original", type=Path, help="file of the original tokenizer")
    options = parser.parse_args()
    oracles: dict[str, Encode] = {}
    if options.library:
        oracles["llama.cpp"] = load_llama_cpp(options.library, options.model)
    if options.original:
        oracles["original"] = load_original(options.original)
    tokenizer = Tokenizer.load(options.model)
    texts = hard_texts()
    own = [tokenizer.encode(each.text, add_special_tokens=False) for each in texts]
    different: dict[str, Counter[str]] = {name: Counter() for name in oracles}
    digests = {"pronk": ids_digest(own)}
    for name, encode in oracles.items():
        wanted = [encode(each.text) for each in texts]
        digests[name] = ids_digest(wanted)
        for (category, text), ids, expected in zip(texts, own, wanted, strict=True):
            if ids == expected:
                continue
            different[name][category] += 1
            if different[name].total() <= 5:
                print(f"{name}: {text!a}: {ids} in place of {expected}")
    print(json.dumps({"texts": corpus_digest(texts), "different": different, "ids": digests}))


if __name__ == "__main__":
    main()
