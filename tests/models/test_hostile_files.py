"""Hostile and damaged model files either load, or are refused with an error of pronk, in little
time and memory.

A sample of the mutations runs always, and more with ``-m slow``. ``tests/loading_worker.py`` loads
the files in processes of its own, so that a crash ends only that process.
"""

import json
import os
import select
import shutil
import subprocess
import sys
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

import latent_models
import mamba_models
import mutations
import recurrent_models
from adapters import write_adapter
from checkpoints import VOCAB, make_checkpoint
from drafting.from_target.random_assistant import write_for_llama
from drafting.from_target.trained_eagle import Form, random_head, write_head
from gguf_files import convert
from loading_worker import WAIT, Request, load
from mutations import Mutation
from pronk.models.config_reader import UNSUPPORTED_KEYS
from pronk.models.families import SUPPORTED, get_family
from quantized_formats import FORMATS, write_quantized

MODELS = Path(__file__).parents[2] / "models"
_WORKER = Path(__file__).parents[1] / "loading_worker.py"
# Transformers lacks MiMo, and the other names are those of images and text.
_NOT_WRITTEN = ("mimo", "gemma4", "qwen3_5", "qwen3_5_moe")
_FAMILIES = [name for name in SUPPORTED if name not in _NOT_WRITTEN]
_MULTIMODAL = ("gemma3", "mistral3")
_DEFAULTS = [get_family(name).defaults for name in _FAMILIES if name not in _MULTIMODAL]
# Keys of config.json that the families read, and that most files lack.
_CONFIG_KEYS = (
    *UNSUPPORTED_KEYS,
    *dict.fromkeys(key for defaults in _DEFAULTS for key in defaults),
    "rope_scaling",
    "rope_parameters",
    "partial_rotary_factor",
    "layer_types",
    "quantization_config",
    "compression_config",
    "text_config",
    "torch_dtype",
    "use_sliding_window",
    "max_window_layers",
    "mlp_only_layers",
    "decoder_sparse_step",
    "is_causal",
    "_name_or_path",
)
_GENERATION = {
    "do_sample": True,
    "temperature": 0.7,
    "top_k": 20,
    "top_p": 0.9,
    "eos_token_id": [0, 1],
    "bos_token_id": 0,
}
_GENERATION_KEYS = (
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "num_beams",
    "suppress_tokens",
    "min_length",
)
_TOKENIZER = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "eos_token": "<|endoftext|>",
    "bos_token": {"content": "<|endoftext|>", "special": True},
    "chat_template": [{"name": "default", "template": "{{ messages }}"}],
    "model_max_length": 256,
}
_SPECIAL_TOKENS = {
    "eos_token": {"content": "<|endoftext|>", "lstrip": False},
    "pad_token": "<|endoftext|>",
}
_ADAPTER_KEYS = (
    "rank_pattern",
    "alpha_pattern",
    "use_rslora",
    "modules_to_save",
    "init_lora_weights",
    "layers_pattern",
)
# Names of shards that are no files of a model folder.
_FILE_NAMES = (
    "",
    ".",
    "..",
    "/etc/passwd",
    "../llama/model.safetensors",
    "a\0b",
    "\ud800",
    "a\nb",
    "x" * 5000,
    "x" * 300 + ".safetensors",
    "/" * 5000,
    "config.json",
)
_GGUF_FAMILIES = (
    "llama",
    "gemma2",
    "gemma3_text",
    "gpt_oss",
    "granite",
    "lfm2",
    "mixtral",
    "olmo3",
    "phi3",
    "qwen3_moe",
)
# Families with keys of their own in GGUF files: recurrent layers, and latent attention.
_OTHER_GGUF = {
    "qwen3_5_text": recurrent_models.write_gguf,
    "falcon_h1": mamba_models.write_gguf,
    "deepseek_v2": latent_models.write_gguf,
}
_MODULES = [
    {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
    {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
]
_POOLING = {"word_embedding_dimension": 64, "pooling_mode_mean_tokens": True}
_ACCEPTANCE = {
    "format": "pronk-head-acceptance/1",
    "counts": [[-1, 1, 0, 9.0, 4.0], [3, 2, 2, 5.0, 0.0]],
}
_FORMATS = (
    "gptq-4-order",
    "awq",
    "packed-4-group-order-zeros",
    "int-8-channel",
    "float-group",
    "fp8-block",
)


_SPLIT = ("split-00001-of-00002.gguf", "split-00002-of-00002.gguf")
THIS = "{this}"  # stands for the path of the folder or file with the change
_MODEL = Request(THIS)


class Case(NamedTuple):
    """A model, or a part of one, and the change of one of its files."""

    kind: str
    base: Path  # folder or GGUF file
    file: str  # name of the changed file in the folder
    mutation: Mutation
    request: Request = _MODEL

    @property
    def label(self) -> str:
        """Name of the case in messages."""
        return f"{self.kind}, {self.base.name}, {self.file}: {self.mutation.label}"


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Undamaged models, by name."""
    root = tmp_path_factory.mktemp("bases")
    made = {family: make_checkpoint(root / family, family) for family in _FAMILIES}
    made["sharded"] = make_checkpoint(root / "sharded", "llama", shard_size="60KB")
    for name in ("llama", "sharded"):
        for file, document in (
            ("generation_config.json", _GENERATION),
            ("tokenizer_config.json", _TOKENIZER),
            ("special_tokens_map.json", _SPECIAL_TOKENS),
        ):
            (made[name] / file).write_text(json.dumps(document))
    made["adapter"] = write_adapter(root / "adapter", made["llama"])
    plain = make_checkpoint(
        root / "plain", "llama", hidden_size=64, intermediate_size=96, num_attention_heads=4
    )
    for name in _FORMATS:
        made[name], _ = write_quantized(plain, root / name, FORMATS[name])
    for family in _GGUF_FAMILIES:
        made[f"{family}.gguf"] = convert(made[family], root / f"{family}.gguf", "F16")
    for family, write in _OTHER_GGUF.items():
        made[f"{family}.gguf"] = write(made[family], root / f"{family}.gguf")
    image = mutations.read_gguf(made["llama.gguf"].read_bytes())
    made["pieces.gguf"] = root / "pieces.gguf"
    made["pieces.gguf"].write_bytes(mutations.with_sentencepiece(image).to_bytes())
    made["split"] = root / "split"
    made["split"].mkdir()
    for name, part in zip(_SPLIT, mutations.split_gguf(image), strict=True):
        (made["split"] / name).write_bytes(part.to_bytes())
    for name, tokenizer in _tokenizers().items():
        made[name] = root / name
        shutil.copytree(made["llama"], made[name])
        tokenizer.save(str(made[name] / "tokenizer.json"))
    made |= _folders_with_more_files(root, made)
    return made | _drafter_bases(root) | _cache_bases(root, made["llama"])


def _folders_with_more_files(root: Path, made: dict[str, Path]) -> dict[str, Path]:
    """Return an embedding model, and a quantized one whose options have a file of their own."""
    embedding = root / "embedding"
    shutil.copytree(made["llama"], embedding)
    (embedding / "modules.json").write_text(json.dumps(_MODULES))
    (embedding / "1_Pooling").mkdir()
    (embedding / "1_Pooling" / "config.json").write_text(json.dumps(_POOLING))
    gptq = root / "gptq"
    shutil.copytree(made["gptq-4-order"], gptq)
    document = read(gptq / "config.json")
    options = document.pop("quantization_config")
    (gptq / "config.json").write_text(json.dumps(document))
    (gptq / "quantize_config.json").write_text(json.dumps(options))
    return {"embedding": embedding, "gptq": gptq}


def _tokenizers() -> dict[str, tokenizers.Tokenizer]:
    """Return tokenizers of the kinds that the tokenizers package has."""
    letters = [chr(each) for each in range(33, 127)]
    pieces = [
        ("<unk>", 0.0),
        *((letter, -3.0) for letter in letters),
        ("\u2581", -2.0),
        ("\u2581Hello", -1.0),
    ]
    unigram = tokenizers.Tokenizer(models.Unigram(pieces, unk_id=0, byte_fallback=False))
    unigram.normalizer = normalizers.NFKC()
    unigram.pre_tokenizer = pre_tokenizers.Metaspace()
    unigram.decoder = decoders.Metaspace()

    words = {
        token: number
        for number, token in enumerate(
            ["[UNK]", "[SEP]", *letters, *(f"##{each}" for each in letters)]
        )
    }
    word_piece = tokenizers.Tokenizer(models.WordPiece(words, unk_token="[UNK]"))
    word_piece.normalizer = normalizers.BertNormalizer()
    word_piece.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    word_piece.post_processor = processors.TemplateProcessing(
        single="$A [SEP]", special_tokens=[("[SEP]", 1)]
    )
    word_piece.decoder = decoders.WordPiece()

    vocab = {token: number for number, token in enumerate(["<unk>", *letters, "\u2581", "ll"])}
    pieces_bpe = tokenizers.Tokenizer(
        models.BPE(vocab, [("l", "l")], unk_token="<unk>", byte_fallback=True)
    )
    pieces_bpe.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    steps = [
        decoders.Replace("\u2581", " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
        decoders.Strip(" ", 1, 0),
    ]
    pieces_bpe.decoder = decoders.Sequence(steps)
    return {"unigram": unigram, "word-piece": word_piece, "pieces": pieces_bpe}


def _drafter_bases(root: Path) -> dict[str, Path]:
    """Return a target, and an EAGLE-3 head, an MTP head and an assistant for it."""
    target = make_checkpoint(
        root / "target", "llama", hidden_size=64, num_hidden_layers=4, num_attention_heads=4
    )
    eagle = random_head(Form("eagle3", vocab=VOCAB))
    mtp = random_head(Form("mtp", vocab=VOCAB, draft=VOCAB, norm_output=True, own_head=False))
    head = write_head(eagle, root / "eagle3")
    (head / "acceptance.json").write_text(json.dumps(_ACCEPTANCE))
    return {
        "target": target,
        "eagle3": head,
        "mtp": write_head(mtp, root / "mtp", "mtp"),
        "gemma4_assistant": write_for_llama(root / "assistant", VOCAB, 64, clusters=12),
    }


def _cache_bases(root: Path, model: Path) -> dict[str, Path]:
    """Return a prompt cache of a model."""
    cache = root / "prompt-cache"
    load(Request(str(model), prompt_cache=str(cache)))
    return {"prompt-cache": cache}


def _config_cases(bases: dict[str, Path]) -> Iterator[Case]:
    for family in _FAMILIES:
        document = read(bases[family] / "config.json")
        missing = [key for key in dict.fromkeys(_CONFIG_KEYS) if key not in document]
        for mutation in mutations.json_values(document, missing):
            yield Case("config.json", bases[family], "config.json", mutation)
    for name in _FORMATS:
        document = read(bases[name] / "config.json")
        for mutation in mutations.json_values(
            {"quantization_config": document["quantization_config"]}
        ):
            changed = mutation._replace(make=partial(_merge, document, mutation.make))
            yield Case("quantization_config", bases[name], "config.json", changed)


def _merge(document: dict[str, Any], make: Callable[[], bytes]) -> bytes:
    return json.dumps(document | json.loads(make())).encode()


def _other_json_cases(bases: dict[str, Path]) -> Iterator[Case]:
    """Change the other JSON files of folders, and the text of all."""
    for base, file, extra in (
        ("llama", "generation_config.json", _GENERATION_KEYS),
        ("llama", "tokenizer_config.json", ("unk_token", "additional_special_tokens")),
        ("llama", "special_tokens_map.json", ("cls_token",)),
        ("sharded", "model.safetensors.index.json", ()),
        ("adapter", "adapter_config.json", _ADAPTER_KEYS),
        ("gptq", "quantize_config.json", ("sym", "checkpoint_format", "dynamic")),
        ("embedding", "1_Pooling/config.json", ("pooling_mode", "pooling_mode_cls_token")),
    ):
        document = read(bases[base] / file)
        request = _adapter_request(bases) if base == "adapter" else _MODEL
        for mutation in (*mutations.json_values(document, extra), *mutations.json_texts(document)):
            yield Case(file, bases[base], file, mutation, request)
    for mutation in _module_lists():
        yield Case("modules.json", bases["embedding"], "modules.json", mutation)
    for mutation in mutations.json_texts(read(bases["llama"] / "config.json")):
        yield Case("config.json text", bases["llama"], "config.json", mutation)
    for mutation in _shard_names(read(bases["sharded"] / "model.safetensors.index.json")):
        yield Case("names of shards", bases["sharded"], "model.safetensors.index.json", mutation)


def _module_lists() -> Iterator[Mutation]:
    """Yield changed lists of modules: ``mutations`` changes objects."""
    for mutation in mutations.json_values({"list": _MODULES}):
        text = json.dumps(json.loads(mutation.make()).get("list")).encode()
        yield mutation._replace(make=partial(bytes, text))
    for mutation in mutations.json_texts({"list": _MODULES}):
        yield mutation


def _shard_names(document: dict[str, Any]) -> Iterator[Mutation]:
    tensors = document["weight_map"]
    for name in _FILE_NAMES:
        for count in (1, len(tensors)):
            changed = tensors | dict.fromkeys([*tensors][:count], name)
            text = json.dumps(document | {"weight_map": changed}).encode()
            yield Mutation(f"{count} tensors in {name!r:.40}", partial(bytes, text))


def _safetensors_cases(bases: dict[str, Path]) -> Iterator[Case]:
    for base, file in (
        ("llama", "model.safetensors"),
        ("awq", "model.safetensors"),
        ("adapter", "adapter_model.safetensors"),
    ):
        request = _adapter_request(bases) if base == "adapter" else _MODEL
        for mutation in mutations.safetensors_files((bases[base] / file).read_bytes()):
            yield Case("safetensors", bases[base], file, mutation, request)


def _adapter_request(bases: dict[str, Path]) -> Request:
    return Request(str(bases["llama"]), adapter=THIS)


def _tokenizer_cases(bases: dict[str, Path]) -> Iterator[Case]:
    for name in ("llama", *_tokenizers()):
        document = read(bases[name] / "tokenizer.json")
        kinds = {
            "tokenizer components": mutations.tokenizer_files(document),
            "tokenizer values": mutations.json_values(document, ("truncation", "padding", "x")),
            "tokenizer text": mutations.json_texts(document),
        }
        for kind, changes in kinds.items():
            for mutation in changes:
                yield Case(kind, bases[name], "tokenizer.json", mutation)


def _gguf_cases(bases: dict[str, Path]) -> Iterator[Case]:
    names = [f"{name}.gguf" for name in (*_GGUF_FAMILIES, *_OTHER_GGUF, "pieces")]
    files = [(bases[name], name, _MODEL) for name in names]
    files += [(bases["split"], name, Request(f"{THIS}/{_SPLIT[0]}")) for name in _SPLIT]
    for base, file, request in files:
        path = base if base.is_file() else base / file
        image = mutations.read_gguf(path.read_bytes())
        for kind, mutate in (
            ("gguf metadata", mutations.gguf_metadata),
            ("gguf tensors", mutations.gguf_tensors),
            ("gguf file", mutations.gguf_files),
        ):
            for mutation in mutate(image):
                yield Case(kind, base, file, mutation, request)


def _drafter_cases(bases: dict[str, Path]) -> Iterator[Case]:
    for name in ("eagle3", "mtp", "gemma4_assistant"):
        base = bases[name]
        request = Request(str(bases["target"]), drafter=f"{name}(model='{THIS}')")
        document = read(base / "config.json")
        for mutation in (*mutations.json_values(document), *mutations.json_texts(document)):
            yield Case("head", base, "config.json", mutation, request)
        if name == "eagle3":
            for mutation in (
                *mutations.json_values(_ACCEPTANCE),
                *mutations.json_texts(_ACCEPTANCE),
            ):
                yield Case("acceptance", base, "acceptance.json", mutation, request)
        for mutation in mutations.safetensors_files((base / "model.safetensors").read_bytes()):
            yield Case("head weights", base, "model.safetensors", mutation, request)


def _cache_cases(bases: dict[str, Path]) -> Iterator[Case]:
    model = str(bases["llama"])
    base = bases["prompt-cache"]
    for file in sorted(base.iterdir()):
        for mutation in mutations.binary_files(file.read_bytes()):
            yield Case("prompt cache", base, file.name, mutation, Request(model, prompt_cache=THIS))


def sample(cases: Iterable[Case], count: int) -> list[Case]:
    """Return a sample of about ``count`` cases that does not depend on the other cases.

    The sample has as many cases of each kind and base; if there are more kinds and bases than
    ``count``, one case of some of them.
    """
    by_kind: dict[tuple[str, str], list[Case]] = {}
    for case in cases:
        by_kind.setdefault((case.kind, case.base.name), []).append(case)
    groups = [sorted(group, key=_order) for group in by_kind.values()]
    groups.sort(key=lambda group: _order(group[0]))
    share = -(-count // len(groups))
    return [case for group in groups[:count] for case in group[:share]]


def _order(case: Case) -> int:
    """Return the place of a case in a random order, which other cases do not change."""
    return zlib.crc32(case.label.encode(errors="replace"))


def read(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_text()))


class Loader:
    """A worker process, which is replaced when it ends."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir()
        self._log = folder / "stderr"
        self._process = self._start()

    def _start(self) -> subprocess.Popen[str]:
        command = [sys.executable, "-X", "faulthandler", str(_WORKER)]
        pipe = subprocess.PIPE
        with self._log.open("a") as log:
            return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=log, text=True)

    def load(self, case: Case) -> tuple[str, str]:
        """Return the outcome of a case, and the message."""
        path = self._folder / "case"
        is_file = case.base.is_file()
        if is_file:
            path = path.with_suffix(".gguf")
            path.write_bytes(case.mutation.make())
        else:
            shutil.copytree(case.base, path)
            (path / case.file).write_bytes(case.mutation.make())
        given = {
            key: text and text.replace(THIS, str(path))
            for key, text in case.request._asdict().items()
        }
        try:
            return self._ask(given)
        finally:
            if is_file:
                path.unlink()
            else:
                shutil.rmtree(path)

    def _ask(self, request: dict[str, Any]) -> tuple[str, str]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        # The worker itself limits the time of Python code; a loop of compiled code is ended here.
        ready, _, _ = select.select([self._process.stdout], [], [], 2 * WAIT)
        line = self._process.stdout.readline() if ready else ""
        if line:
            answer = json.loads(line)
            return answer["outcome"], answer["message"]
        self.close()
        code = self._process.returncode
        self._process = self._start()
        return ("died" if ready else "slow", f"exit status {code}: {self._log.read_text()[-2000:]}")

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.communicate()


@pytest.fixture(scope="module")
def loader(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Loader]:
    """A worker process for all cases, which takes a second to start."""
    made = Loader(tmp_path_factory.mktemp("loader") / "worker")
    yield made
    made.close()


_KINDS: dict[str, Callable[[dict[str, Path]], Iterator[Case]]] = {
    "config": _config_cases,
    "json": _other_json_cases,
    "safetensors": _safetensors_cases,
    "gguf": _gguf_cases,
    "tokenizer": _tokenizer_cases,
    "drafter": _drafter_cases,
    "cache": _cache_cases,
}


def check(cases: Iterable[Case], loader: Loader) -> None:
    """Load the files of the cases; fail if one of them neither loads nor is refused."""
    failures = []
    outcomes = Counter[tuple[str, str]]()
    for case in cases:
        outcome, message = loader.load(case)
        outcomes[case.kind, outcome] += 1
        if outcome not in ("loads", "refused"):
            failures.append(f"{case.label}: {outcome}: {message}")
    report = os.environ.get("PRONK_MUTATIONS_REPORT")
    if report:
        Path(report).write_text(json.dumps([[*map(list, outcomes.items())], failures], indent=1))
    assert not failures, f"{len(failures)} of {outcomes.total()} cases: " + "\n".join(failures[:5])


def check_undamaged(cases: Iterable[Case], loader: Loader) -> None:
    """Load the files of the cases without their mutations."""
    by_base = {case.base: case for case in cases}
    for case in by_base.values():
        file = case.base if case.base.is_file() else case.base / case.file
        undamaged = case._replace(mutation=Mutation("none", file.read_bytes))
        assert loader.load(undamaged) == ("loads", ""), undamaged.label


@pytest.mark.long
@pytest.mark.parametrize("kind", _KINDS)
def test_files_load_or_are_refused(bases: dict[str, Path], loader: Loader, kind: str) -> None:
    """No file crashes the process, raises another exception, or takes much time or memory.

    Undamaged files load: a refusal of a changed file is due to the change.
    """
    cases = sample(_KINDS[kind](bases), 12)
    check_undamaged(cases, loader)
    check(cases, loader)


@pytest.mark.slow
@pytest.mark.parametrize("kind", _KINDS)
def test_many_files_load_or_are_refused(bases: dict[str, Path], loader: Loader, kind: str) -> None:
    """The same, with thousands of files."""
    check(sample(_KINDS[kind](bases), 1000), loader)


@pytest.mark.slow
def test_there_are_at_least_two_thousand_files(bases: dict[str, Path]) -> None:
    assert sum(len(sample(cases(bases), 1000)) for cases in _KINDS.values()) >= 2000
