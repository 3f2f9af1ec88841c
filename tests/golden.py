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
from contextlib import closing
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np

import pronk
from checkpoints import FAMILIES, make_checkpoint
from gguf_files import CONVERTED, QUANTIZED, STORED, convert
from pronk import LLM, SamplingParams
from pronk.kernels.library import INSTRUCTION_SETS
from pronk.testing import byte_tokenizer
from quantized_formats import FORMATS, write_quantized

PATH = Path(__file__).with_suffix(".json")
NUM_TOKENS = 64
_PROMPT = list(range(20, 44)) + list(range(30, 60))

# Options of the sampled texts. Log-probabilities are part of a digest. High temperatures, because some
# random models are almost sure of each token.
PARAMS = {
    "greedy": SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=3),
    "noise": SamplingParams(
        max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=3, temperature=5.0, seed=7
    ),
    "truncated": SamplingParams(
        max_tokens=NUM_TOKENS,
        ignore_eos=True,
        temperature=3.0,
        seed=8,
        top_p=0.9,
        min_p=0.01,
        repetition_penalty=1.1,
        frequency_penalty=0.2,
        presence_penalty=0.1,
    ),
}

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
    **{name: partial(_quantized, name) for name in FORMATS},
    **{
        kind: partial(_gguf, kind)
        for kind in ["F32", "F16", "BF16", "MXFP4", *QUANTIZED, *CONVERTED, *STORED]
    },
}


def digests(path: Path, kernels: str = "auto") -> dict[str, str]:
    """Return the digests of a model: of a text's log-probabilities and of the sampled texts."""
    found = {}
    llm = LLM(
        path,
        drafter="autoregressive",
        dtype="float32",
        kv_memory="64MiB",
        kernels=kernels,
        bits="portable",
    )
    with closing(llm):
        assert llm.kernels in INSTRUCTION_SETS, "expected the kernels, found torch; build them"
        scored = SamplingParams(max_tokens=1, prompt_logprobs=64)
        completion = llm.generate(_PROMPT, scored)
        found["text"] = _digest(completion.prompt_logprobs or ())
        for name, params in PARAMS.items():
            completion = llm.generate(_PROMPT, params)
            assert len(completion.token_ids) == NUM_TOKENS
            tokens = [{token: 0.0} for token in completion.token_ids]
            found[name] = _digest([*tokens, *(completion.logprobs or ())])
    return found


def _digest(reports: Iterable[Mapping[int, float] | None]) -> str:
    """Return a digest of token ids and log-probabilities, which are rounded to float32."""
    digest = blake2b(digest_size=8)
    for report in reports:
        for token, logprob in (report or {}).items():
            digest.update(token.to_bytes(4, "little") + np.float32(logprob).tobytes())
    return digest.hexdigest()


def read() -> dict[str, dict[str, dict[str, str]]]:
    """Return the recorded digests: ``{model: {bits: {text: digest}}}``."""
    found: dict[str, dict[str, dict[str, str]]] = json.loads(PATH.read_text(encoding="utf-8"))
    return found


def current(history: Mapping[str, dict[str, str]]) -> dict[str, str]:
    """Return the digests of a model that hold for this version of pronk."""
    known = [bits for bits in map(int, history) if bits <= pronk.BITS]
    return history[str(max(known))] if known else {}


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
    parser.add_argument("--write", action="store_true", help="write golden.json")
    parser.add_argument("--unreleased", action="store_true", help="replace digests of pronk.BITS")
    arguments = parser.parse_args()
    recorded = read() if PATH.exists() else {}
    num_others = 0
    for name, found in compute(arguments.names or MODELS, arguments.kernels):
        known = current(recorded.get(name, {}))
        if known != found:
            num_others += 1
            sys.stdout.write(f"{name}: expected {known}, found {found}\n")
        if arguments.write or arguments.unreleased:
            record(recorded, name, found, pronk.BITS, unreleased=arguments.unreleased)
            PATH.write_text(_to_json(recorded), encoding="utf-8")
    return 1 if num_others and not (arguments.write or arguments.unreleased) else 0


if __name__ == "__main__":
    sys.exit(main())
