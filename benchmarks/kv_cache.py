"""Perplexity, memory and speed of a model with each data type of the KV cache.

    python benchmarks/kv_cache.py perplexity MODEL TEXT.txt --tokens 4000
    python benchmarks/kv_cache.py speed MODEL --tokens 16000 --steps 40

``perplexity`` reads the first tokens of the text in chunks and scores each token from those before
it. ``speed`` measures plain steps of decoding after a text of which the cache has made-up keys and
values; the models take turns, and the figure is the median of the steps. Both print a line per data
type; ``auto`` is the model's own.
"""

from __future__ import annotations

import argparse
import math
import statistics
from pathlib import Path

import numpy as np

from pronk import LLM
from pronk.base.arrays import KV_DTYPES, Array
from pronk.cache.blocks import BlockTable
from pronk.models.forward_batch import BatchEntry, ForwardBatch
from pronk.sampling.tree import TokenTree

_CHUNK = 250  # tokens per forward pass


class Text:
    """Tokens in the KV cache of a model."""

    def __init__(self, llm: LLM) -> None:
        self._llm = llm
        self._block_table = BlockTable()

    def fill(self, num_tokens: int) -> None:
        """Append tokens without computing them; each byte of their keys and values is 60."""
        cache = self._llm.engine.cache
        cache.prepare(self._block_table, num_tokens)
        for pool in (*cache.keys, *cache.values):
            pool.view(np.uint8)[...] = 60  # in each data type a number of 0.01 to 60
        self._block_table.length = num_tokens

    def extend(self, ids: list[int]) -> tuple[Array, float]:
        """Append tokens; return their logits, and the seconds of the forward pass."""
        cache = self._llm.engine.cache
        length = self._block_table.length
        cache.prepare(self._block_table, length + len(ids))
        entry = BatchEntry(self._block_table, TokenTree.chain(ids), range(len(ids)), len(ids))
        result = self._llm.engine.runner.forward(ForwardBatch([entry]))
        cache.commit_slots(self._block_table, range(len(ids)))
        return result.logits[0], result.seconds


def load(model: str, kv_dtype: str, options: argparse.Namespace) -> LLM:
    """Return a model whose KV cache has room for the text."""
    return LLM(
        model,
        kv_dtype=kv_dtype,
        kernels=options.kernels,
        threads=options.threads,
        max_batch=1,
        calibration=False,
    )


def loss_per_token(llm: LLM, ids: list[int]) -> float:
    """Return the mean of -log p of the tokens after the first."""
    text = Text(llm)
    total = 0.0
    for first in range(0, len(ids) - 1, _CHUNK):
        inputs = ids[first : first + _CHUNK]
        logits, _ = text.extend(inputs)
        targets = ids[first + 1 : first + 1 + len(inputs)]
        numbers = logits[: len(targets)].astype(np.float64)
        largest = numbers.max(-1, keepdims=True)
        log_sums = np.log(np.exp(numbers - largest).sum(-1)) + largest[:, 0]
        total += float((log_sums - numbers[range(len(targets)), targets]).sum())
    return total / (len(ids) - 1)


def measure_perplexity(options: argparse.Namespace) -> None:
    """Print the perplexity with each data type, and its ratio to that with the first."""
    reference: float | None = None
    for kv_dtype in options.dtype:
        llm = load(options.model, kv_dtype, options)
        ids = llm.tokenizer.encode(options.text.read_text())[: options.tokens]
        loss = loss_per_token(llm, ids)
        reference = loss if reference is None else reference
        change = 100 * (math.exp(loss - reference) - 1)
        print(
            f"{kv_dtype:5} {len(ids)} tokens, perplexity {math.exp(loss):.4f} ({change:+.2f} % "
            f"to {options.dtype[0]})",
            flush=True,
        )


def measure_speed(options: argparse.Namespace) -> None:
    """Print bytes per token, and the time of steps after a text."""
    texts = dict[str, Text]()
    bytes_per_token = dict[str, int]()
    for kv_dtype in options.dtype:
        llm = load(options.model, kv_dtype, options)
        texts[kv_dtype] = Text(llm)
        texts[kv_dtype].fill(options.tokens)
        bytes_per_token[kv_dtype] = llm.engine.cache.bytes_per_token
    seconds: dict[str, list[float]] = {kv_dtype: [] for kv_dtype in texts}
    for _ in range(options.steps):
        for kv_dtype, text in texts.items():
            seconds[kv_dtype].append(text.extend([1])[1])
    for kv_dtype in texts:
        size = bytes_per_token[kv_dtype]
        milliseconds = [1e3 * each for each in seconds[kv_dtype]]
        print(
            f"{kv_dtype:5} {size:,} bytes a token, {size * options.tokens / 1e6:.1f} MB, step "
            f"{statistics.median(milliseconds):.2f} ms (smallest {min(milliseconds):.2f})",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("perplexity", "speed"))
    parser.add_argument("model", help="a GGUF file or a folder")
    parser.add_argument("text", type=Path, nargs="?")
    parser.add_argument("--tokens", type=int, default=4000)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--dtype", nargs="+", choices=tuple(KV_DTYPES), default=["int8", "int4"])
    parser.add_argument("--kernels", default="auto")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    if options.what == "perplexity":
        measure_perplexity(options)
    else:
        measure_speed(options)


if __name__ == "__main__":
    main()
