"""One run on a machine with an NVIDIA GPU: tests, then figures. Nothing here was measured yet.

    python benchmarks/gpu/run.py results.jsonl                # all parts, about 9 minutes
    python benchmarks/gpu/run.py results.jsonl --parts b c    # some of them
    TRITON_INTERPRET=1 python benchmarks/gpu/run.py results.jsonl --tiny      # without a GPU

On a machine without a network, where pronk cannot be installed, ``prepare.py`` makes it ready::

    python benchmarks/gpu/prepare.py build/site
    PYTHONPATH=src:build/site python benchmarks/gpu/run.py results.jsonl

Each part is a process with a time limit of its own, and appends its results, one JSON object each,
to the file as soon as it has them. A part that fails or exceeds its limit does not end the run, and
a drafter that fails does not end part a. The limits of all parts are 9 minutes together. The parts:

    a  the tests of the runner, whose output is written beside the results (``.tests.txt``); ten
       drafters against plain decoding on a random model of 160 M weights (``grammar`` needs
       llguidance)
    b  ms of a captured step of Llama 8B's shape in bfloat16, over 1 to 128 rows after 128 and 8,000
       tokens, against its floor: bytes of the weights and keys over the measured bandwidth
    c  the same in 4 bits, in groups of 32
    d  a step of 32 requests; a prompt of 4,000 tokens against torch's own products
    e  lookahead: a step with the rows of windows 1 to 15, and one device's share of the rows of the
       largest window if 2, 4 or 8 devices divided them (simulated)
    f  the processor: passes of a random model of 900 M weights in 4 bits on 16 to 1 threads
    g  transformers with a static cache and torch.compile, on 8 layers of the model of b

Weights are random, so texts are noise and acceptance means nothing. If memory or time are short,
``--layers 8`` computes a part of the layers; the figures are then of these layers.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
import torch
from safetensors.numpy import save_file
from safetensors.torch import load_file
from safetensors.torch import save_file as save_tensors

from pronk import LLM, Guide, SamplingParams
from pronk.backends import (
    BatchEntry,
    BlockTable,
    Decoder,
    ForwardBatch,
    ModelConfig,
    ModelRunner,
    Norm,
    StatelessSampler,
    choose_kernels,
)
from pronk.base.arrays import BFLOAT16, FLOAT32
from pronk.checkpoint import llama_config
from pronk.gpu import device as gpu_device
from pronk.gpu.model import GpuModel
from pronk.gpu.pool import GpuPool
from pronk.gpu.runner import GpuRunner
from pronk.gpu.weights import GpuLinear, GpuMatrix, padded_inputs
from pronk.kernels.threads import set_threads
from pronk.sampling.tree import TokenTree
from pronk.testing import tiny_checkpoint

ROOT = Path(__file__).parents[2]
# Seconds that each part may take.
LIMITS = {"a": 170, "b": 90, "c": 60, "d": 55, "e": 40, "f": 70, "g": 55}
# Seconds of part a that the tests may take; the drafters have the rest.
TESTS_LIMIT = 80
# The tests of part a, those that matter most first. Without test_compile.py, which needs no device.
TESTS = ("kernels", "equality", "walk", "chains", "graphs", "head", "device")
SLOWER = 10  # factor of the limits of a run without a GPU
ROWS = (1, 4, 16, 64, 128)
CONTEXTS = (128, 8000)
GROUP = 32  # inputs per scale of 4-bit weights
ROUNDS = 30
THREADS = (16, 8, 4, 2, 1)  # the fastest first
TRANSFORMERS_LAYERS = 8  # more take too long to initialize and compile
DRAFTERS = (
    "suffix",
    "prompt_lookup(min_ngram=1)",
    "recycling",
    "lookahead(window=5, ngram=3, guesses=5)",
    "jacobi",
    "draft_model({draft})",
    "threshold(draft_model({draft}))",
    "cape(draft_model({draft}))",
    "eagle3({head})",
    "autoregressive",  # with a guide, whose forced tokens the drafter grammar proposes
)
GRAMMAR = Guide(regex='\\{"name": "[a-z]{4}", "number": [0-9]{3}\\}')


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("results", type=Path, help="file that results are appended to")
    parser.add_argument("--parts", nargs="*", choices=[*LIMITS], default=[*LIMITS])
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--tiny", action="store_true", help="tiny shapes on the CPU")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    report = Report(options.results)
    if options.child:
        PARTS[options.parts[0]](report, options)
        return
    report.add("machine", **describe())
    for part in options.parts:
        limit = LIMITS[part] * (SLOWER if options.tiny else 1)
        command = [sys.executable, *sys.argv, "--child", "--parts", part]
        start = perf_counter()
        try:
            done = subprocess.run(command, timeout=limit, check=False)  # noqa: S603
            code = done.returncode
        except subprocess.TimeoutExpired:
            code = -1
        report.add("end", part=part, code=code, seconds=perf_counter() - start)


class Report:
    """File of results, one JSON object per line."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def add(self, kind: str, **values: Any) -> None:
        """Print and append a result of a kind."""
        line = json.dumps({"kind": kind, **values})
        print(line, flush=True)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")


def describe() -> dict[str, Any]:
    """Return the GPU and the versions of what computes."""
    has_gpu = torch.cuda.is_available()
    return {
        "gpu": torch.cuda.get_device_name() if has_gpu else None,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
    }


def seconds(work: Callable[[], object], rounds: int = ROUNDS) -> float:
    """Return the median duration of a call, the device's work included."""
    work()
    times = []
    for _ in range(rounds):
        synchronize()
        start = perf_counter()
        work()
        synchronize()
        times.append(perf_counter() - start)
    return median(times)


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def shape(options: argparse.Namespace) -> ModelConfig:
    """Return the config of Llama 8B, or a tiny one."""
    if options.tiny:
        sizes = {"hidden": 64, "layers": 1, "heads": 4, "kv_heads": 1, "mlp": 96, "vocab": 100}
    else:
        sizes = {
            "hidden": 4096,
            "layers": options.layers,
            "heads": 32,
            "kv_heads": 8,
            "mlp": 14336,
            "vocab": 128256,
        }
    return llama_config(**sizes, context=16384)


def random_linear(outputs: int, inputs: int, weights: str, device: torch.device) -> GpuLinear:
    """Return a layer with random weights of standard deviation ``inputs ** -0.5``."""
    width = padded_inputs(inputs)
    spread = inputs**-0.5
    if weights == "plain":
        values = torch.randn(outputs, width, dtype=torch.bfloat16, device=device) * spread
        return GpuLinear(GpuMatrix(values, outputs, inputs))
    codes = torch.randint(0, 256, (outputs, width // 2), dtype=torch.uint8, device=device)
    scale = torch.full((outputs, width // GROUP), spread / 4.6, device=device).half()
    return GpuLinear(
        GpuMatrix(codes, outputs, inputs, format="int4", group=GROUP, zero=8, scale=scale)
    )


def random_runner(options: argparse.Namespace, weights: str, requests: int = 1) -> GpuRunner:
    """Return a runner of random weights; its pool has room for ``requests`` long texts."""
    config = shape(options)
    device = torch.device("cpu" if options.tiny else "cuda")
    kernels = choose_kernels("auto", "fast")
    decoder = Decoder(config, kernels)
    hidden = config.hidden_size
    ones = np.ones(hidden, np.float32)
    decoder.norm = Norm.of(config, ones)
    decoder.embedding = np.empty((0, hidden), FLOAT32)
    made: Any = decoder
    made.table = random_linear(config.vocab_size, hidden, "plain", device)
    made.head = random_linear(config.vocab_size, hidden, weights, device)
    for layer in made.layers:
        layer.attention_norm = Norm.of(config, ones)
        layer.mlp_norm = Norm.of(config, ones)
        layer.qkv = random_linear(sum(config.qkv_sizes), hidden, weights, device)
        layer.out = random_linear(hidden, config.qkv_sizes[0], weights, device)
        layer.up = random_linear(2 * config.intermediate_size, hidden, weights, device)
        layer.down = random_linear(hidden, config.intermediate_size, weights, device)
    pool = GpuPool(
        config,
        device=device,
        kernels=kernels,
        num_blocks=requests * (8320 // 16),
        block_size=16,
        dtype=BFLOAT16,
    )
    return GpuRunner(decoder, GpuModel(decoder, pool))


def read_bytes(runner: GpuRunner, tokens: int) -> int:
    """Return the bytes that a step reads: weights, and keys and values of ``tokens`` tokens."""
    decoder: Any = runner.decoder
    linears = [decoder.head]
    for layer in decoder.layers:
        linears += [layer.qkv, layer.out, layer.up, layer.down]
    weights = sum(linear.matrix.nbytes for linear in linears)
    return weights + tokens * runner.cache.bytes_per_token


def bandwidth(runner: GpuRunner) -> float:
    """Return the measured bytes per second of reading and writing the device's memory."""
    device = runner.cache.keys[0].device
    size = 1 << (20 if device.type == "cpu" else 31)
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * size / seconds(lambda: target.copy_(source))


def text_of(runner: GpuRunner, tokens: int, rows: int) -> BlockTable:
    """Return the table of a text whose keys are zeros, with slots for ``rows`` rows."""
    table = BlockTable()
    runner.cache.prepare(table, tokens + rows)
    table.length = tokens
    return table


def chain(table: BlockTable, rows: int) -> BatchEntry:
    """Return a chain to verify, as the engine makes it for a greedy request."""
    tree = TokenTree.chain([7] * rows)
    return BatchEntry(table, tree, range(rows), stateless_sampler=StatelessSampler(0.0, 0))


def seconds_of_pass(runner: ModelRunner, entries: Sequence[BatchEntry], rounds: int) -> float:
    """Return the median duration of a pass, the host's work for its batch included."""
    return seconds(lambda: runner.forward(ForwardBatch(entries)), rounds)


def check(report: Report, options: argparse.Namespace) -> None:
    """Part a."""
    run_tests(report, options)
    with tempfile.TemporaryDirectory() as name:
        compare_drafters(report, options, Path(name))


def run_tests(report: Report, options: argparse.Namespace) -> None:
    """Run the tests of the GPU runner, or a few of them; also report those of an unfinished run."""
    # Other versions of packages may warn, which the project's own options make an error.
    command = [sys.executable, "-m", "pytest", "-v", "-W", "default", "-p", "no:cacheprovider"]
    command += ["-o", "addopts=--import-mode=importlib", "-m", "not slow"]
    command += [f"tests/gpu/test_{name}.py" for name in TESTS]
    limit = TESTS_LIMIT
    if options.tiny:
        command += ["-k", "norms"]
        limit *= SLOWER
    output = options.results.with_suffix(".tests.txt")
    code = None
    with output.open("w", encoding="utf-8") as file, suppress(subprocess.TimeoutExpired):
        code = subprocess.run(  # noqa: S603 - this repository's tests
            command,
            cwd=ROOT,
            env=os.environ | {"PYTHONUNBUFFERED": "1"},
            stdout=file,
            stderr=subprocess.STDOUT,
            check=False,
            timeout=limit,
        ).returncode
    lines = output.read_text(encoding="utf-8").splitlines()
    report.add("tests", code=code, **count_tests(lines), end=lines[-3:])


def count_tests(lines: Sequence[str]) -> dict[str, Any]:
    """Return the results of finished tests in the output of ``pytest -v``."""
    passed = 0
    failed = list[str]()
    for line in lines:
        name, _, result = line.partition(" ")
        if not name.startswith("tests/"):
            continue
        passed += result.startswith("PASSED")
        if result.startswith(("FAILED", "ERROR")):
            failed.append(name)
    return {"passed": passed, "failed": failed}


def compare_drafters(report: Report, options: argparse.Namespace, folder: Path) -> None:
    """Count the tokens that differ from those of plain decoding, for each drafter."""
    layers, hidden, max_tokens = (1, 32, 6) if options.tiny else (30, 768, 128)
    target = tiny_checkpoint(folder / "target", layers=layers, hidden=hidden)
    draft = tiny_checkpoint(folder / "draft", layers=min(layers, 2), hidden=hidden, seed=1)
    names = {
        "draft": f"model={str(draft)!r}",
        "head": f"model={str(random_head(folder / 'head', layers, hidden))!r}",
    }
    if options.tiny:
        # the device of the tests: Triton's interpreter
        gpu_device.find_gpu = lambda _: torch.device("cpu")  # type: ignore[assignment]
    # whatever drafts cost, they are verified
    llm = LLM(target, device="cuda", dtype="bfloat16", drafter="autoregressive", budget="all")
    prompts = ["abab"] if options.tiny else ["def add(a, b):", "one two three one two three one"]
    for temperature in (0.0, 0.8):
        plain = SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=5)
        guided = replace(plain, guide=GRAMMAR)
        unforced = replace(guided, guide_mode="plain")
        want = [each.token_ids for each in llm.generate(prompts, plain)]
        for spec in DRAFTERS:
            is_guided = spec == "autoregressive"
            name = "grammar" if is_guided else spec
            try:
                if is_guided:
                    want = [each.token_ids for each in llm.generate(prompts, unforced)]
                got = llm.generate(
                    prompts, guided if is_guided else plain, drafter=spec.format(**names)
                )
            except Exception as error:  # noqa: BLE001 - the other drafters are compared
                report.add("equality", drafter=name, temperature=temperature, error=repr(error))
                continue
            found = [each.token_ids for each in got]
            report.add(
                "equality",
                drafter=name,
                temperature=temperature,
                tokens=sum(map(len, want)),
                drafted=sum(each.stats.drafted for each in got),
                accepted=sum(each.stats.accepted for each in got),
                differing=sum(map(count_differing, found, want)),
            )


def count_differing(found: Sequence[int], want: Sequence[int]) -> int:
    """Return the number of positions at which two texts differ."""
    return sum(one != other for one, other in zip_longest(found, want))


def random_head(folder: Path, layers: int, hidden: int) -> Path:
    """Write an EAGLE-3 head with random weights for a tiny checkpoint; return its folder."""
    vocab = 300
    heads = hidden // 16
    config = {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "speculators_config": {
            "algorithm": "eagle3",
            "verifier": {"name_or_path": "tiny", "architectures": []},
        },
        "draft_vocab_size": vocab,
        "eagle_aux_hidden_state_layer_ids": [min(layer, layers) for layer in (1, 2, 3)],
        "transformer_layer_config": {
            "model_type": "llama",
            "hidden_size": hidden,
            "intermediate_size": 2 * hidden,
            "num_hidden_layers": 1,
            "num_attention_heads": heads,
            "num_key_value_heads": heads // 2,
            "head_dim": 16,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-6,
            "vocab_size": vocab,
            "max_position_embeddings": 512,
            "rope_theta": 10000.0,
        },
    }
    shapes = {
        "fc": (hidden, 3 * hidden),
        "lm_head": (vocab, hidden),
        "layers.0.self_attn.q_proj": (hidden, 2 * hidden),
        "layers.0.self_attn.k_proj": (hidden // 2, 2 * hidden),
        "layers.0.self_attn.v_proj": (hidden // 2, 2 * hidden),
        "layers.0.self_attn.o_proj": (hidden, hidden),
        "layers.0.mlp.gate_proj": (2 * hidden, hidden),
        "layers.0.mlp.up_proj": (2 * hidden, hidden),
        "layers.0.mlp.down_proj": (hidden, 2 * hidden),
    }
    norms = ("norm", "layers.0.input_layernorm", "layers.0.hidden_norm")
    dice = np.random.default_rng(0)
    tensors = {
        f"{name}.weight": (shape[1] ** -0.5 * dice.standard_normal(shape)).astype(np.float32)
        for name, shape in shapes.items()
    }
    for name in (*norms, "layers.0.post_attention_layernorm"):
        tensors[f"{name}.weight"] = np.ones(hidden, np.float32)
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def measure_steps(report: Report, options: argparse.Namespace, weights: str) -> None:
    """Parts b and c."""
    runner = random_runner(options, weights)
    speed = bandwidth(runner)
    report.add("bandwidth", bytes_per_second=speed)
    for tokens in (16,) if options.tiny else CONTEXTS:
        floor = read_bytes(runner, tokens) / speed
        for rows in (1, 4) if options.tiny else ROWS:
            table = text_of(runner, tokens, rows)
            rounds = 2 if options.tiny else ROUNDS
            took = seconds_of_pass(runner, [chain(table, rows)], rounds)
            runner.cache.release(table)
            report.add(
                "step",
                weights=weights,
                layers=runner.decoder.config.num_layers,
                tokens=tokens,
                rows=rows,
                ms=1e3 * took,
                floor_ms=1e3 * floor,
                of_floor=took / floor,
            )


def measure_batch(report: Report, options: argparse.Namespace) -> None:
    """Part d."""
    count, tokens = (2, 16) if options.tiny else (32, 4000)
    runner = random_runner(options, "plain", requests=1 + count // 4)
    tables = [text_of(runner, 16 if options.tiny else 1000, 1) for _ in range(count)]
    took = seconds_of_pass(runner, [chain(table, 1) for table in tables], 5)
    report.add("batch", requests=count, ms=1e3 * took)
    for table in tables:
        runner.cache.release(table)

    def prompt() -> None:
        table = text_of(runner, 0, tokens)
        for start in range(0, tokens, 512):
            chunk = min(512, tokens - start)
            entry = BatchEntry(table, TokenTree.chain([7] * chunk), range(chunk - 1, chunk))
            runner.forward(ForwardBatch([entry]))
            runner.cache.commit_slots(table, range(chunk))
        runner.cache.release(table)

    took = seconds(prompt, 2)
    config = runner.decoder.config
    head = config.vocab_size * config.hidden_size * 2
    products = tokens * (read_bytes(runner, 0) - head) // 2
    attention = config.num_layers * config.num_heads * config.head_dim * tokens * (tokens + 1)
    device = runner.cache.keys[0].device
    x = torch.randn(512, config.hidden_size, dtype=torch.bfloat16, device=device)
    w = torch.randn(config.intermediate_size * 2, config.hidden_size, device=device).bfloat16()
    torch_speed = x.numel() * len(w) / seconds(lambda: x @ w.T)
    speed = (products + attention) / took
    report.add(
        "prompt",
        tokens=tokens,
        ms=1e3 * took,
        products_per_second=speed,
        of_torch=speed / torch_speed,
    )


def measure_lookahead(report: Report, options: argparse.Namespace) -> None:
    """Part e: the rows of a window W with n-grams of 5 and W guesses are 8 W; at most 120."""
    runner = random_runner(options, "plain")
    windows = (1, 2) if options.tiny else (1, 3, 5, 7, 10, 15)
    tokens = 16 if options.tiny else 1000
    of_rows = dict[int, float]()
    largest = 8 * windows[-1]
    for rows in sorted(
        {1, *(8 * window for window in windows), *(largest // n for n in (2, 4, 8))}
    ):
        table = text_of(runner, tokens, rows)
        of_rows[rows] = seconds_of_pass(runner, [chain(table, rows)], 5)
        runner.cache.release(table)
    for window in windows:
        ratio = of_rows[8 * window] / of_rows[1]
        report.add("lookahead", window=window, rows=8 * window, of_one_row=ratio)
    for devices in (2, 4, 8):
        ratio = of_rows[largest // devices] / of_rows[largest]
        report.add("simulated", devices=devices, rows=largest // devices, of_one_device=ratio)


def measure_processor(report: Report, options: argparse.Namespace) -> None:
    """Part f."""
    with tempfile.TemporaryDirectory() as name:
        layers, hidden = (2, 64) if options.tiny else (24, 2048)
        folder = tiny_checkpoint(Path(name) / "model", layers=1, hidden=hidden)
        repeat_layer(folder, layers)
        llm = LLM(folder, weights="int4", threads=THREADS[0], drafter="autoregressive")
        runner = llm.engine.runner
        for threads in THREADS:
            set_threads(threads, workers=1)
            for rows in (1, 4, 16):
                table = text_of(runner, 64, rows)
                took = seconds_of_pass(runner, [chain(table, rows)], 9)
                runner.cache.release(table)
                report.add("processor", threads=threads, rows=rows, ms=1e3 * took)
        llm.close()


def repeat_layer(folder: Path, layers: int) -> None:
    """Give a checkpoint of one layer copies of this layer; store all weights in bfloat16.

    Random numbers for each layer would take most of the time of part f.
    """
    file = folder / "model.safetensors"
    tensors = {name: tensor.bfloat16() for name, tensor in load_file(file).items()}
    for name in [name for name in tensors if ".layers.0." in name]:
        for layer in range(1, layers):
            tensors[name.replace(".layers.0.", f".layers.{layer}.")] = tensors[name].clone()
    save_tensors(tensors, file)
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    config |= {"num_hidden_layers": layers, "torch_dtype": "bfloat16"}
    path.write_text(json.dumps(config), encoding="utf-8")


def measure_transformers(report: Report, options: argparse.Namespace) -> None:
    """Part g."""
    from transformers import LlamaConfig, LlamaForCausalLM, StaticCache  # noqa: PLC0415 - optional

    options.layers = min(options.layers, TRANSFORMERS_LAYERS)
    own = shape(options)
    device = "cpu" if options.tiny else "cuda"
    config = LlamaConfig(
        hidden_size=own.hidden_size,
        intermediate_size=own.intermediate_size,
        num_hidden_layers=own.num_layers,
        num_attention_heads=own.num_heads,
        num_key_value_heads=own.num_kv_heads,
        vocab_size=own.vocab_size,
        max_position_embeddings=own.context,
    )
    with torch.device(device), torch.inference_mode():
        model = LlamaForCausalLM(config).to(torch.bfloat16).eval()
        cache = StaticCache(config=config, max_cache_len=1024)
        # the prompt, which also allocates the cache: torch.compile must not see that
        model(torch.zeros(1, 128, dtype=torch.int64), past_key_values=cache)
        step = model if options.tiny else torch.compile(model, mode="reduce-overhead")
        token = torch.zeros(1, 1, dtype=torch.int64)
        for _ in range(3):
            step(token, past_key_values=cache)
        took = seconds(lambda: step(token, past_key_values=cache), ROUNDS)
    report.add("transformers", layers=own.num_layers, ms=1e3 * took)


PARTS: dict[str, Callable[[Report, argparse.Namespace], None]] = {
    "a": check,
    "b": lambda report, options: measure_steps(report, options, "plain"),
    "c": lambda report, options: measure_steps(report, options, "int4"),
    "d": measure_batch,
    "e": measure_lookahead,
    "f": measure_processor,
    "g": measure_transformers,
}


if __name__ == "__main__":
    main()
