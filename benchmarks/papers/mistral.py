"""KV cache and prefill of a sliding window (Mistral 7B, Jiang et al. 2023, section 2).

    python benchmarks/papers/mistral.py                      # 32,768 tokens, a window of 4,096
    python benchmarks/papers/mistral.py --out results/mistral

The model is pronk-tiny with the configuration of Mistral's family: its context is longer and, in
one of two copies, all layers have the window. The texts of the model are meaningless, but the
number of cached tokens is that of a larger model.

1. The KV cache of one request, after the prefill and at its peak, with and without the window. In
   the paper, it is 8 times smaller at 32 thousand tokens. Blocks of tokens that have left the
   window are free for other requests.
2. The prefill without and with the window, and by the size of its chunks: 512 tokens (the
   default), and one window as in figure 3 of the paper. In the paper, the window halves the time at
   16 thousand tokens (``--length 16384``).
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from pathlib import Path
from time import strftime
from typing import Literal, NamedTuple

from pronk import LLM, SamplingParams
from pronk.base.files.results import save_result
from pronk.cache.blocks import BlockTable
from pronk.checkpoint.hub.clone_models import tiny_model
from pronk.lab.bench.machine import describe_hardware

OUTPUT = 32  # number of tokens to decode after the prompt
PAPER = 8.0  # factor by which the cache is smaller with the window, in the paper


class Measurement(NamedTuple):
    """KV cache and time of one request."""

    window: int | None
    chunk: int  # tokens of the prompt per forward pass
    decoding: int  # bytes of the cache while tokens are decoded
    peak: int  # bytes of the cache at its peak, in the prefill
    prefill: float  # seconds to the first token
    tokens: list[int]


def write_model(folder: Path, window: int | None, context: int) -> Path:
    """Write a copy of pronk-tiny with a window in all layers, or with none; return its folder."""
    shutil.copytree(tiny_model(), folder)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    changes = {
        "model_type": "mistral",
        "architectures": ["MistralForCausalLM"],
        "sliding_window": window,
    }
    path.write_text(json.dumps(config | changes | {"max_position_embeddings": context}))
    return folder


def measure(
    folder: Path, window: int | None, chunk: int | Literal["window"], length: int, threads: int
) -> Measurement:
    """Decode one request, and read the size of the KV cache at each allocation of blocks.

    Args:
        folder: folder of the model.
        window: window of its layers.
        chunk: number of tokens of the prompt per forward pass.
        length: number of tokens of prompt and output.
        threads: number of threads.
    """
    llm = LLM(
        folder,
        prefill_chunk=chunk,
        max_batch=1,
        threads=threads,
        drafter="autoregressive",
        kv_memory="4GiB",
    )
    allocator = llm.engine.cache.allocator
    held = list[int]()
    allocate = allocator.allocate

    def counted(block_table: BlockTable, tokens: int) -> None:
        allocate(block_table, tokens)
        held.append(allocator.num_blocks - allocator.num_free)

    allocator.allocate = counted  # type: ignore[method-assign]
    prompt = [16 + number * 7919 % 4000 for number in range(length - OUTPUT)]
    params = SamplingParams(max_tokens=OUTPUT, ignore_eos=True)
    done = llm.generate(prompt, params)
    bytes_per_block = llm.engine.cache.block_size * llm.engine.cache.bytes_per_token
    decoding = held[-1] * bytes_per_block
    peak = max(held) * bytes_per_block
    size = llm.engine.scheduler.prefill_chunk
    return Measurement(window, size, decoding, peak, done.stats.ttft, done.token_ids)


def memory_table(found: list[Measurement]) -> str:
    """Return the Markdown table of the KV caches with and without the window."""
    full = found[0]
    rolling = found[1]
    lines = ["| attention | while decoding, MB | peak, MB |", "|---|--:|--:|"]
    for each in (full, rolling):
        name = "full" if each.window is None else f"window of {each.window}"
        lines.append(f"| {name} | {each.decoding / 1e6:.1f} | {each.peak / 1e6:.1f} |")
    decoding_factor = full.decoding / rolling.decoding
    lines.append(f"| factor | {decoding_factor:.2f} | {full.peak / rolling.peak:.2f} |")
    return "\n".join(lines) + f"\n\nThe paper: a factor of {PAPER:.0f}."


def chunk_table(found: list[Measurement], length: int) -> str:
    """Return the Markdown table of times and KV caches by window and size of chunks."""
    columns = ["attention", "tokens per chunk", "prefill, s", "tokens/s", "peak, MB"]
    lines = [f"| {' | '.join(columns)} |", "|---|--:|--:|--:|--:|"]
    for each in found:
        name = "full" if each.window is None else f"window of {each.window}"
        rate = (length - OUTPUT) / each.prefill
        cells = [name, f"{each.chunk}", f"{each.prefill:.2f}", f"{rate:.0f}"]
        cells.append(f"{each.peak / 1e6:.1f}")
        lines.append(f"| {' | '.join(cells)} |")
    ratio = found[0].prefill / found[1].prefill
    return "\n".join(lines) + f"\n\nFull attention over the window: {ratio:.2f} times the time."


def main() -> None:
    """Run the measurements, and print the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--length", type=int, default=32768, help="tokens of prompt and output")
    parser.add_argument("--window", type=int, default=4096)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", help="file name without ending, for .md and .json")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folders = {
            window: write_model(Path(temporary) / str(window), window, options.length)
            for window in (None, options.window)
        }
        settings: list[tuple[int | None, int | Literal["window"]]] = [
            (None, 512),
            (options.window, 512),
            (options.window, "window"),
        ]
        found = [
            measure(folders[window], window, chunk, options.length, options.threads)
            for window, chunk in settings
        ]
    if found[1].tokens != found[2].tokens:
        msg = "mistral: expected equal tokens with both sizes of chunks, found others"
        raise SystemExit(msg)
    machine = f"{describe_hardware('cpu')['processor']}, {options.threads} threads"
    head = f"{options.length} tokens; {machine}, {strftime('%B %Y')}"
    text = f"{head}\n\n{memory_table(found)}\n\n{chunk_table(found, options.length)}\n"
    measurements = [each._asdict() | {"tokens": None} for each in found]
    document = {"machine": head, "measurements": measurements}
    print(text)
    if options.out is not None:
        page = f"# Sliding window: memory and prefill\n\n{text}"
        save_result("out", Path(f"{options.out}.json"), json.dumps(document))
        save_result("out", Path(f"{options.out}.md"), page)


if __name__ == "__main__":
    main()
