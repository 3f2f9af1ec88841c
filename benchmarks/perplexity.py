"""Perplexity of a GGUF file in pronk, in llama.cpp and in float32, and their distances.

    python benchmarks/perplexity.py MODEL.gguf TEXTS.jsonl.gz --tokens 20000
    python benchmarks/perplexity.py MODEL.gguf TEXTS.jsonl.gz --tokens 2000 --float32

TEXTS has one JSON object per line, with a ``text``. The first ``--context`` tokens of each text
count. ``--float32`` adds the dequantized weights in float32, computed by torch, which is slow. KL
is the mean divergence KL(A ‖ B) of the distributions over positions, in nats. "first" is the
fraction of positions where both engines have the same most probable token.
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
from collections.abc import Callable
from itertools import permutations
from pathlib import Path

import llama_cpp
import numpy as np
import torch

from pronk import LLM
from pronk.base.arrays import Array
from pronk.base.convert import to_array
from pronk.cache.blocks import BlockTable
from pronk.models.forward_batch import BatchEntry, ForwardBatch
from pronk.sampling.tree import TokenTree
from pronk.train.attention import dense_logits
from pronk.train.modules.decoder import load_module

# Function from token ids to float32 logits ``[tokens, vocab]``.
Logits = Callable[[list[int]], Array]


def pronk_logits(llm: LLM) -> Logits:
    """Return a function from token ids to the logits of a loaded model."""

    def logits(ids: list[int]) -> Array:
        block_table = BlockTable()
        llm.engine.cache.prepare(block_table, len(ids))
        entry = BatchEntry(block_table, TokenTree.chain(ids), range(len(ids)), len(ids))
        result = llm.engine.runner.forward(ForwardBatch([entry])).logits[0]
        llm.engine.cache.release(block_table)
        return result

    return logits


def dense_float32_logits(llm: LLM) -> Logits:
    """Return a function to the logits of the dequantized weights in float32, by torch."""
    module = load_module(llm.path, llm.config, torch.float32, torch.device("cpu"))

    @torch.no_grad()
    def logits(ids: list[int]) -> Array:
        return to_array(dense_logits(module, torch.tensor([ids])))

    return logits


def llama_logits(model: str, context: int, threads: int) -> Logits:
    """Load a model into llama.cpp; return a function from token ids to its logits."""
    llama = llama_cpp.Llama(
        model,
        n_ctx=context,
        n_batch=context,
        n_threads=threads,
        logits_all=True,
        verbose=False,
        flash_attn=False,
    )

    def logits(ids: list[int]) -> Array:
        llama.reset()
        llama.eval(ids)
        return np.array(llama.scores[: len(ids)])

    return logits


def log_probs(logits: Array) -> Array:
    """Return the logarithm of the softmax of each row, in float64."""
    shifted = logits.astype(np.float64) - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def read_texts(path: Path) -> list[str]:
    """Return the texts in a compressed file of JSON lines."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return [json.loads(line)["text"] for line in file]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", help="a GGUF file")
    parser.add_argument("texts", type=Path)
    parser.add_argument("--tokens", type=int, default=20000, help="stop after so many tokens")
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--float32", action="store_true")
    options = parser.parse_args()
    llm = LLM(options.model, threads=options.threads)
    engines = {
        "pronk": pronk_logits(llm),
        "llama.cpp": llama_logits(options.model, options.context, options.threads),
    }
    if options.float32:
        engines["float32"] = dense_float32_logits(llm)
    losses = dict.fromkeys(engines, 0.0)
    distances = dict.fromkeys(permutations(engines, 2), 0.0)
    same = dict.fromkeys(distances, 0)
    count = 0
    for text in read_texts(options.texts):
        ids = llm.tokenizer.encode(text)[: options.context]
        if len(ids) < options.context // 4 or count >= options.tokens:
            continue
        logs = {name: log_probs(logits(ids)[:-1]) for name, logits in engines.items()}
        for name, log in logs.items():
            losses[name] -= float(log[range(len(log)), ids[1:]].sum())
        for one, other in distances:
            distances[one, other] += float((np.exp(logs[one]) * (logs[one] - logs[other])).sum())
            same[one, other] += int((logs[one].argmax(-1) == logs[other].argmax(-1)).sum())
        count += len(ids) - 1
    windows = f"{count} tokens in windows of {options.context}"
    print(f"{Path(options.model).name}, {windows}, {llm.kernels}")
    reference = losses["llama.cpp"]
    for name, loss in losses.items():
        ratio = math.exp((loss - reference) / count) - 1
        perplexity = math.exp(loss / count)
        print(f"{name:10} perplexity {perplexity:9.4f}  ({100 * ratio:+.3f} % to llama.cpp's)")
    for (one, other), total in distances.items():
        first = f"first {100 * same[one, other] / count:.2f} %"
        print(f"KL({one} ‖ {other}) {total / count:.5f}, {first}")


if __name__ == "__main__":
    main()
