"""Digests of tokens, logits and log-probabilities of small random models, for every processor.

    python tests/golden.py              # compare with golden.json
    python tests/golden.py --write      # add the digests of a new model or of a new pronk.BITS
    python tests/golden.py llama gptq-4 # these models only

The weights are drawn with integers (``checkpoints.PortableDraws``), and the models are loaded in
float32, so that the digests are the same on every machine. ``golden.json`` has for each model the
digests since each value of ``pronk.BITS`` that changed them. ``--write`` refuses to change a digest
of the current value: raise ``pronk.BITS``, and say in CHANGELOG.md what changed. Before a value is
released, ``--unreleased`` replaces its digests.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pronk
from checkpoints import FAMILIES, make_checkpoint
from gguf_files import CONVERTED, QUANTIZED, STORED, convert
from model_digests import digests
from pronk import reproducibility
from pronk.kernels import library
from pronk.testing import byte_tokenizer
from quantized_formats import FORMATS, write_quantized

PATH = Path(__file__).with_suffix(".json")
# Sizes of the models in GGUF files: the largest blocks have 256 weights.
_BLOCKS = {
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def _family(name: str, folder: Path) -> Path:
    return make_checkpoint(folder, name, portable=True)


def _int4_cache(name: str, folder: Path) -> Path:
    path = make_checkpoint(folder, name, portable=True)
    options = json.dumps({"kv_dtype": "int4"})
    (path / "llm_options.json").write_text(options, encoding="utf-8")
    return path


def _quantized(name: str, folder: Path) -> Path:
    plain = make_checkpoint(folder / "plain", "llama", portable=True, hidden_size=96)
    return write_quantized(plain, folder, FORMATS[name])[0]


def _gguf(kind: str, folder: Path) -> Path:
    plain = make_checkpoint(folder / "plain", "llama", portable=True, **_BLOCKS)
    return convert(plain, folder / "model.gguf", kind, tokenizer=byte_tokenizer(300))


MakeModel = Callable[[Path], Path]

# Functions that write a model into a folder and return its path, by the model's name.
MODELS: dict[str, MakeModel] = {
    **{name: partial(_family, name) for name in FAMILIES},
    **{f"{name}, int4 cache": partial(_int4_cache, name) for name in ("qwen2", "deepseek_v3")},
    **{name: partial(_quantized, name) for name in FORMATS},
    **{
        kind: partial(_gguf, kind)
        for kind in ["F32", "F16", "BF16", "MXFP4", *QUANTIZED, *CONVERTED, *STORED]
    },
}


def read() -> dict[str, dict[str, dict[str, str]]]:
    """Return the recorded digests: ``{model: {bits: {text: digest}}}``."""
    found: dict[str, dict[str, dict[str, str]]] = json.loads(PATH.read_text(encoding="utf-8"))
    return found


def compute(names: Iterable[str], kernels: str = "auto") -> Iterator[tuple[str, dict[str, str]]]:
    """Make models, and yield their names and digests."""
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            yield name, digests(MODELS[name](Path(folder) / "model"), kernels)


def record(
    recorded: dict[str, dict[str, dict[str, str]]],
    name: str,
    found: dict[str, str],
    bits: int,
    *,
    unreleased: bool = False,
) -> None:
    """Add the digests of a model to the recorded ones.

    Raises:
        ValueError: other digests of this value of ``pronk.BITS`` are recorded.
    """
    history = recorded.setdefault(name, {})
    known = history[max(history, key=int)] if history else None
    if known == found:
        return
    if str(bits) in history and not unreleased:
        msg = f"{name}: expected the digests of pronk.BITS = {bits}, found others; raise pronk.BITS"
        msg += " in src/pronk/__init__.py, and say in CHANGELOG.md what changed"
        raise ValueError(msg)
    history[str(bits)] = found


def _to_json(recorded: Mapping[str, Any]) -> str:
    lines = [f"{json.dumps(name)}: {json.dumps(recorded[name])}" for name in sorted(recorded)]
    return "{\n" + ",\n".join(lines) + "\n}\n"


def main() -> int:
    """Run the command; return its status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="MODEL", help="models; by default all")
    parser.add_argument("--kernels", default="auto", help="instruction set; by default the widest")
    parser.add_argument("--library", type=Path, help="file of the kernels; by default pronk's own")
    parser.add_argument("--write", action="store_true", help="write golden.json")
    parser.add_argument("--unreleased", action="store_true", help="replace digests of pronk.BITS")
    arguments = parser.parse_args()
    if arguments.library is not None:
        if not arguments.library.is_file():
            found = f"found no such file: {arguments.library}"
            parser.error(f"--library: expected a file of kernels, {found}; build one")
        library.installed_library = arguments.library.resolve
    recorded = read() if PATH.exists() else {}
    num_others = 0
    for name, found in compute(arguments.names or MODELS, arguments.kernels):
        known = reproducibility.current(recorded.get(name, {}))
        if known != found:
            num_others += 1
            sys.stdout.write(f"{name}: expected {known}, found {found}\n")
        if arguments.write or arguments.unreleased:
            record(recorded, name, found, pronk.BITS, unreleased=arguments.unreleased)
            PATH.write_text(_to_json(recorded), encoding="utf-8")
    return 1 if num_others and not (arguments.write or arguments.unreleased) else 0


if __name__ == "__main__":
    sys.exit(main())
