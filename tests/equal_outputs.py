"""Outputs of random requests, to compare processes with other instruction sets and NumPy dispatch.

    python tests/equal_outputs.py FOLDER KERNELS SEED COUNT

prints one JSON object: a digest for each request, and counts of what the requests covered. The folder
is that of :func:`write_models`.
"""

import json
import random
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, closing
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np

from pronk import LLM, Guide, SamplingParams
from pronk.checkpoint import tiny_model
from pronk.engine.outputs import Completion

DRAFTERS = (
    "auto",
    "suffix",
    "prompt_lookup(min_ngram=1)",
    "recycling",
    "lookahead(window=4, ngram=3, guesses=4)",
    "jacobi",
    "merged(prompt_lookup, recycling)",
)
GUIDES = (
    Guide(regex=r"[a-z ]{4,20}\."),
    Guide(choice=("yes", "no", "perhaps")),
    Guide(json={"type": "object", "properties": {"a": {"type": "integer"}}}),
)
# Options of the models, by name; "int8" has rounded weights, an adapter and rounded keys and values,
# "blocks.gguf" keys and values of 4 bits.
MODELS: dict[str, dict[str, Any]] = {
    "int8": {"weights": "int8", "kv_dtype": "int8", "prefix_cache": True},
    "plain": {"prefill_chunk": 16, "max_batch": 3},
    "blocks.gguf": {"budget": "all", "kv_dtype": "int4"},
    "recurrent": {"prefix_cache": True, "budget": "all"},
}
_VALUES: dict[str, list[Any]] = {
    "top_k": [3, 50],
    "top_p": [0.5, 0.95],
    "min_p": [0.05],
    "repetition_penalty": [1.1],
    "presence_penalty": [0.5],
    "frequency_penalty": [-0.5, 1.0],
    "logit_bias": [{5: 4.0, 30: -100.0}],
    "n": [2],
    "logprobs": [0, 3],
    "prompt_logprobs": [2],
}


def write_models(folder: Path) -> None:
    """Write the models and the adapter that need torch to be made."""
    # These import torch, which the requests need not.
    from adapters import write_adapter
    from golden import MODELS as GOLDEN

    write_adapter(folder / "adapter", tiny_model())
    for name, golden in {"blocks": "Q4_K", "recurrent": "qwen3_5_text"}.items():
        GOLDEN[golden](folder / name).rename(folder / next(n for n in MODELS if n.startswith(name)))


def _load(name: str, folder: Path, kernels: str) -> LLM:
    options = {"kernels": kernels, "bits": "portable", "kv_memory": "64MiB", **MODELS[name]}
    if name == "int8":
        options["adapters"] = {"a": folder / "adapter"}
    path = folder / name
    return LLM(path if path.exists() else tiny_model(), threads=1, calibration=False, **options)


def _random_params(choose: random.Random, *, guides: bool) -> SamplingParams:
    options: dict[str, Any] = {
        "max_tokens": choose.randint(4, 24),
        "seed": choose.randrange(2**32),
        "temperature": choose.choice([0.0, 0.0, 0.7, 1.0, 3.0]),
        "ignore_eos": True,
    }
    for name, values in _VALUES.items():
        if choose.random() < 0.2:
            options[name] = choose.choice(values)
    if guides and choose.random() < 0.25:
        options["guide"] = choose.choice(GUIDES)
        options["ignore_eos"] = False
    return SamplingParams(**options)


def _random_prompt(choose: random.Random) -> list[int]:
    """Return a prompt that repeats itself: random tokens, or a beginning that fills blocks."""
    if choose.random() < 0.5:
        return [*range(30, 70)] * choose.randint(1, 3)
    words = [[choose.randrange(20, 250) for _ in range(choose.randint(1, 6))] for _ in range(3)]
    return [token for _ in range(choose.randint(3, 12)) for token in choose.choice(words)]


def outputs(
    folder: Path, kernels: str, seed: int, count: int, counts: Counter[str]
) -> Iterator[Completion]:
    """Yield the completions of ``count`` random requests, in batches of 1 to 4.

    ``counts`` gets the numbers of requests with guides and with the adapter.
    """
    choose = random.Random(seed)
    with ExitStack() as stack:
        models = {
            name: stack.enter_context(closing(_load(name, folder, kernels))) for name in MODELS
        }
        made = 0
        while made < count:
            name = choose.choice([*MODELS])
            size = min(count - made, choose.randint(1, 4))
            prompts = [_random_prompt(choose) for _ in range(size)]
            params = [_random_params(choose, guides=name in ("int8", "plain")) for _ in prompts]
            drafter = choose.choice(DRAFTERS)
            adapter = choose.choice(["a", None]) if name == "int8" else None
            counts["guided"] += sum(each.guide is not None for each in params)
            counts["adapted"] += size * (adapter is not None)
            yield from models[name].generate(prompts, params, drafter=drafter, adapter=adapter)
            made += size


def _digest(completion: Completion) -> str:
    digest = blake2b(digest_size=8)
    for each in (completion, *completion.others):
        found = (each.token_ids, each.text, each.finish_reason, each.logprobs, each.prompt_logprobs)
        digest.update(repr(found).encode())
    return digest.hexdigest()


def main() -> None:
    """Run the command."""
    (folder, kernels, seed, count) = sys.argv[1:]
    counts = Counter[str]()
    digests = []
    for completion in outputs(Path(folder), kernels, int(seed), int(count), counts):
        digests.append(_digest(completion))
        counts["accepted"] += completion.stats.accepted
        counts["drafted"] += completion.stats.drafted
        counts["cached"] += completion.stats.cached_tokens
    numpy = np._core._multiarray_umath  # type: ignore[attr-defined]
    used = [name for name in numpy.__cpu_dispatch__ if numpy.__cpu_features__[name]]
    sys.stdout.write(json.dumps({"digests": digests, "counts": counts, "numpy": used}))


if __name__ == "__main__":
    main()
