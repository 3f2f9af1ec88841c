"""Speed of a mixture of experts: plain decoding, passes of several rows, and ``auto``.

    python benchmarks/experts.py                      # random model of 1.0 B parameters
    python benchmarks/experts.py --folder /tmp/moe    # keep the model, about 2 GB, for later runs

The model has 32 experts, of which a token chooses 4. The weights are random and loaded with 4 bits.
``--common`` is the part of the embeddings that all tokens share, so that neighbouring tokens choose
the same experts, as in real texts. The script prints the resulting overlap: the probability that
two rows choose the same expert.

    floor   time to read the bytes that a token needs, at the memory bandwidth of all threads
    union   time of one row that reads the experts of all rows; see ``models/cost_model.py``
    auto    time of plain decoding divided by that of ``auto``: less than 1 is slower

In the last part, drafters propose 4 tokens per step with a confidence of 1, each of which is right
with the given probability; *text* has the drafters that ``auto`` chooses. Figures are medians, with
the 10th and 90th percentiles in brackets. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
from pathlib import Path
from time import perf_counter
from typing import Any

import ml_dtypes
import numpy as np
from never_slower import PLAIN, Case, WrongProposer, run
from passes import CONTEXT, prepared, quantile
from safetensors.numpy import save_file

from pronk import LLM, SamplingParams
from pronk.base.arrays import Array, mapped_zeros
from pronk.lab.bench.machine import describe_hardware
from pronk.models.cost_model import CostCurve, CostModel
from pronk.models.decoder import count_parameters, fixed_costs, forward_weights
from pronk.models.forward_batch import BatchEntry, ForwardBatch
from pronk.sampling.tree import TokenTree
from pronk.testing import byte_tokenizer

ROWS = (1, 2, 4, 8, 16)
READ_BYTES = 1 << 28  # bytes read at a time to measure the bandwidth; more than any cache holds
RATES = (0.0, 0.5, 0.8)  # probabilities of right draft tokens
POOL = 1 << 24  # number of different random weights


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--folder", type=Path, help="folder of the model, written if it does not exist"
    )
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--width", type=int, default=608, help="width of an expert")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument(
        "--common", type=float, default=0.35, help="part that all embeddings share, 0 to 1"
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=128, help="length of each text")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary) / "experts"
        if not (folder / "config.json").is_file():
            write_model(folder, options.hidden, options.width, options.layers, options.common)
        measure(folder, options)


def measure(folder: Path, options: argparse.Namespace) -> None:
    """Measure the model in a folder, and print all figures."""
    llm = LLM(folder, weights="int4", threads=options.threads, drafter=PLAIN)
    decoder = llm.engine.runner.decoder
    count = count_parameters(llm.config)
    touched = forward_weights(decoder)
    size = f"{count / 1e6:.0f} M parameters, {touched.nbytes / 1e6:.0f} MB"
    read = f"of which a token reads {touched.floor_bytes / 1e6:.0f} MB"
    print(f"{size}, {read}; {llm.kernels}, {options.threads} threads")
    report: dict[str, Any] = {
        "machine": describe_hardware("cpu"),
        "kernels": llm.kernels,
        "threads": options.threads,
    }
    report["passes"] = by_rows(llm, options.rounds)
    report["auto"] = by_drafter(llm, options.tokens, max(2, options.rounds // 5))
    print(json.dumps(report))


def by_rows(llm: LLM, rounds: int) -> dict[str, Any]:
    """Measure passes over ``ROWS`` rows of random tokens, and in turn the memory bandwidth."""
    runner = llm.engine.runner
    dice = random.Random(0)
    kernels = runner.decoder.kernels
    assert kernels is not None, "expected pronk's kernels, found torch"
    buffer = mapped_zeros((READ_BYTES,), np.dtype(np.uint8))
    buffer[:] = 1  # pages of zeros that were never written take no memory
    tables = [prepared(llm, rows)[0] for rows in ROWS]
    # Seconds by number of rows; 0 rows stand for reading the buffer.
    took: dict[int, list[float]] = {rows: [] for rows in (0, *ROWS)}
    unions: dict[int, list[float]] = {rows: [] for rows in ROWS}
    for _ in range(rounds):
        began = perf_counter()
        kernels.read(buffer)
        took[0].append(perf_counter() - began)
        for rows, table in zip(ROWS, tables, strict=True):
            tokens = [dice.randrange(1, llm.config.vocab_size) for _ in range(rows)]
            tree = TokenTree.chain(tokens)
            began = perf_counter()
            result = runner.forward(ForwardBatch([BatchEntry(table, tree, range(rows), CONTEXT)]))
            took[rows].append(perf_counter() - began)
            assert result.experts_read is not None
            unions[rows].append(result.experts_read)
    for table in tables:
        llm.engine.cache.release(table)
    seconds = {rows: statistics.median(each) for rows, each in took.items()}
    bandwidth = READ_BYTES / seconds[0]
    floor = forward_weights(runner.decoder).floor_bytes / bandwidth
    fixed = fixed_costs(runner.decoder)
    model = CostModel(*fixed)
    plain = f"plain {seconds[1] / floor:.2f} x floor"
    print(f"bandwidth {bandwidth / 1e9:.1f} GB/s, floor {1e3 * floor:.2f} ms; {plain}")
    print(" rows        ms  [10 %, 90 %]       experts   union ms   x union")
    table_rows = dict[int, dict[str, float]]()
    for rows in ROWS:
        union = statistics.mean(unions[rows])
        priced = CostCurve(seconds[1], 0.0, 0.0, experts=fixed.experts).at(rows, union)
        model.learn(rows, CONTEXT, seconds[rows], experts_read=union)
        low = 1e3 * quantile(took[rows], 0.1)
        high = 1e3 * quantile(took[rows], 0.9)
        times = f"{1e3 * seconds[rows]:9.2f}  [{low:.2f}, {high:.2f}]"
        print(f"{rows:5} {times:28}{union:9.2f}{1e3 * priced:11.2f}{seconds[rows] / priced:10.2f}")
        table_rows[rows] = {"median": seconds[rows], "experts": union, "union": priced}
    costs = model.costs(CONTEXT)
    assert costs is not None
    print(f"overlap of two rows: {costs.overlap:.2f}")
    return {"bandwidth": bandwidth, "floor": floor, "rows": table_rows, "overlap": costs.overlap}


def by_drafter(llm: LLM, tokens: int, rounds: int) -> dict[str, list[float]]:
    """Compare drafters with plain decoding, in alternating order; see ``never_slower.py``."""
    dice = random.Random(0)
    params = SamplingParams(max_tokens=tokens, temperature=0.8, seed=1, ignore_eos=True)
    prompts = [[dice.randrange(1, llm.config.vocab_size) for _ in range(60)] for _ in range(4)]
    prompt = prompts[0]
    cases = {"text": Case("text", [prompt], params)}
    for rate in RATES:
        made = lambda texts, _, rate=rate: WrongProposer(texts, share=rate)  # noqa: E731
        cases[f"right {rate}"] = Case(f"right {rate}", [prompt], params, made)
    cases["batch of 4"] = Case("batch of 4", prompts, params)
    llm.generate([prompt], SamplingParams(max_tokens=8), drafter="auto")
    print("time of plain decoding / with the drafter")
    found = dict[str, list[float]]()
    for name, case in cases.items():
        ratios = run(llm, case, rounds)
        found[name] = ratios
        spread = f"[{min(ratios):.3f}, {max(ratios):.3f}]"
        print(f"{name:12}{statistics.median(ratios):7.3f} {spread}", flush=True)
    return found


def write_model(folder: Path, hidden: int, width: int, layers: int, common: float) -> None:
    """Write a random Qwen3-MoE of 32 experts, of which a token chooses 4."""
    vocab = 320
    head_dim = 128 if hidden % 1024 == 0 else 64
    experts = 32
    heads = hidden // head_dim
    kv_heads = max(1, heads // 4)
    document = {
        "model_type": "qwen3_moe",
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": 4096,
        "num_experts": experts,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": width,
        "norm_topk_prob": True,
        "eos_token_id": 0,
        "dtype": "bfloat16",
    }
    generator = np.random.default_rng(0)
    pool = generator.standard_normal(min(POOL, 4 * hidden * max(hidden, width)), np.float32)

    def matrix(rows: int, columns: int, scale: float = 1.0) -> Array:
        start = int(generator.integers(len(pool) - rows * columns))
        values = pool[start : start + rows * columns].reshape(rows, columns)
        return (values * np.float32(scale * columns**-0.5)).astype(ml_dtypes.bfloat16)

    gains = {size: np.ones(size, ml_dtypes.bfloat16) for size in (hidden, head_dim)}
    shared = generator.standard_normal(hidden, np.float32)
    own = generator.standard_normal((vocab, hidden), np.float32)
    tokens = common**0.5 * shared + (1.0 - common) ** 0.5 * own
    tensors = {
        "model.embed_tokens.weight": tokens.astype(ml_dtypes.bfloat16),
        "model.norm.weight": gains[hidden],
    }
    tensors["lm_head.weight"] = matrix(vocab, hidden, 2.5)
    for layer in range(layers):
        path = f"model.layers.{layer}."
        for name, (rows, columns) in {
            "self_attn.q_proj": (heads * head_dim, hidden),
            "self_attn.k_proj": (kv_heads * head_dim, hidden),
            "self_attn.v_proj": (kv_heads * head_dim, hidden),
            "self_attn.o_proj": (hidden, heads * head_dim),
            "mlp.gate": (experts, hidden),
        }.items():
            tensors[f"{path}{name}.weight"] = matrix(rows, columns)
        for expert in range(experts):
            for name, shape in (
                ("gate", (width, hidden)),
                ("up", (width, hidden)),
                ("down", (hidden, width)),
            ):
                tensors[f"{path}mlp.experts.{expert}.{name}_proj.weight"] = matrix(*shape)
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{path}{name}.weight"] = gains[hidden]
        for name in ("self_attn.q_norm", "self_attn.k_norm"):
            tensors[f"{path}{name}.weight"] = gains[head_dim]
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    byte_tokenizer(300).save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps(document), encoding="utf-8")


if __name__ == "__main__":
    main()
