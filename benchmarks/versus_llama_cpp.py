"""Plain decoding and prefill of a GGUF file by pronk and by llama.cpp, and the floor of memory.

    python benchmarks/versus_llama_cpp.py MODEL.gguf
    python benchmarks/versus_llama_cpp.py MODEL.gguf --rounds 20 --prompts 700 4000 --long-rounds 3

llama.cpp must be built for this processor::

    CMAKE_ARGS=-DGGML_NATIVE=ON pip install --no-binary llama-cpp-python llama-cpp-python

llama.cpp runs with and without flash attention; ratios are to the faster of the two in the same
round. Each engine is a process of its own, and waits while another one is measured. In a round, all
engines have the same random prompt. The floor is the time to read the bytes that a token needs, as
stored in the file, at the bandwidth measured in the same round. Figures are medians, with the 10th
and 90th percentiles in brackets. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
import statistics
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from time import perf_counter, sleep
from typing import Any

PROMPT = 16  # tokens of the short prompt
TOKENS = 48  # tokens decoded after the short prompt
LONG_TOKENS = 24  # tokens decoded after each long prompt
PAUSE = 0.05  # seconds after which the threads of the engine measured before sleep

# Function from token ids of a prompt and a number of tokens to the seconds until each token.
Decode = Callable[[Sequence[int], int], list[float]]


def open_pronk(model: str, threads: int, context: int) -> tuple[Decode, dict[str, Any]]:
    """Load a model into pronk; return the function that decodes, and sizes of the model.

    For 0 tokens, the function measures the memory bandwidth in bytes per second.
    """
    from pronk import LLM, SamplingParams  # noqa: PLC0415 - llama.cpp's processes do not need it
    from pronk.diagnosis import BandwidthMeter  # noqa: PLC0415
    from pronk.lab.bench.machine import describe_hardware  # noqa: PLC0415
    from pronk.models.decoder import forward_weights  # noqa: PLC0415

    llm = LLM(model, threads=threads)
    assert llm.config.context >= context, (
        f"expected a context of {context} tokens, found {llm.config.context}"
    )
    decoder = llm.engine.runner.decoder
    size = forward_weights(decoder)
    meter = BandwidthMeter(decoder.kernels)

    def decode(prompt: Sequence[int], tokens: int) -> list[float]:
        params = SamplingParams(max_tokens=tokens, ignore_eos=True, temperature=0.0)
        stats = llm.generate(list(prompt), params, drafter="autoregressive").stats
        return [stats.ttft, *(step.clock for step in stats.steps[1:])]

    def measure(prompt: Sequence[int], tokens: int) -> list[float]:
        return decode(prompt, tokens) if tokens else [meter.measure()]

    sizes = {"floor_bytes": size.floor_bytes, "packed_bytes": size.nbytes, "weights": size.count}
    return measure, {**sizes, "vocab": llm.config.vocab_size, **describe_hardware("cpu")}


def open_llama(
    model: str, threads: int, context: int, *, flash: bool
) -> tuple[Decode, dict[str, Any]]:
    """Load a model into llama.cpp; return the function that decodes, and versions."""
    import llama_cpp  # noqa: PLC0415 - only this process needs it

    llama = llama_cpp.Llama(
        model,
        n_ctx=context,
        n_threads=threads,
        n_threads_batch=threads,
        flash_attn=flash,
        verbose=False,
    )

    def decode(prompt: Sequence[int], tokens: int) -> list[float]:
        llama.reset()
        llama._ctx.kv_cache_clear()  # noqa: SLF001 - there is no public method
        began = perf_counter()
        times = list[float]()
        for _ in llama.generate(list(prompt), top_k=1, temp=0.0, repeat_penalty=1.0):
            times.append(perf_counter() - began)
            if len(times) == tokens:
                return times
        return times

    system = " ".join(llama_cpp.llama_print_system_info().decode().split())
    return decode, {"llama-cpp-python": llama_cpp.__version__, "system": system}


def serve(engine: str, model: str, threads: int, context: int, pipe: Connection) -> None:
    """Load a model into an engine, and answer requests for measurements until ``None``.

    This is the work of a process of :class:`Engines`.
    """
    if engine == "pronk":
        decode, about = open_pronk(model, threads, context)
    else:
        decode, about = open_llama(model, threads, context, flash=engine.endswith("flash"))
    pipe.send(about)
    while (request := pipe.recv()) is not None:
        sleep(PAUSE)
        pipe.send(decode(*request))


class Engines:
    """One process per engine, measured one after the other."""

    def __init__(self, model: str, threads: int, context: int, names: Sequence[str]) -> None:
        spawn = multiprocessing.get_context("spawn")
        self.pipes: dict[str, Connection] = {}
        self.about: dict[str, Any] = {}
        for name in names:
            ours, theirs = spawn.Pipe()
            arguments = (name, model, threads, context, theirs)
            spawn.Process(target=serve, args=arguments, daemon=True).start()
            self.pipes[name] = ours
            self.about[name] = ours.recv()

    def measure(self, name: str, prompt: Sequence[int], tokens: int) -> list[float]:
        """Return the seconds until each token; for 0 tokens, the bandwidth of pronk's process."""
        self.pipes[name].send((prompt, tokens))
        found: list[float] = self.pipes[name].recv()
        return found

    def close(self) -> None:
        """Stop the processes."""
        for pipe in self.pipes.values():
            pipe.send(None)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", help="a GGUF file")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument(
        "--prompts", type=int, nargs="*", default=[700], help="lengths of long prompts in tokens"
    )
    parser.add_argument(
        "--long-rounds", type=int, help="rounds of the second and later lengths; default: --rounds"
    )
    options = parser.parse_args()
    context = max([PROMPT + TOKENS, *(prompt + LONG_TOKENS for prompt in options.prompts)]) + 8
    names = ["pronk", "llama.cpp", "llama.cpp flash"]
    engines = Engines(options.model, options.threads, context, names)
    about = engines.about["pronk"]
    print(f"{options.model.rpartition('/')[2]}, {options.threads} threads, {about['processor']}")
    report: dict[str, Any] = {"about": engines.about, "lengths": {}}
    for number, prompt in enumerate([PROMPT, *options.prompts]):
        rounds = options.rounds if number < 2 else options.long_rounds or options.rounds
        report["lengths"][prompt] = compare(engines, names, prompt, rounds, about)
    engines.close()
    print(json.dumps(report))


def compare(
    engines: Engines, names: Sequence[str], length: int, rounds: int, about: dict[str, Any]
) -> dict[str, Any]:
    """Measure prompts of a length in all engines; print times, and ratios to the floor."""
    first: dict[str, list[float]] = {name: [] for name in names}
    later: dict[str, list[float]] = {name: [] for name in names}
    floors = list[float]()
    tokens = TOKENS if length == PROMPT else LONG_TOKENS
    for number in range(rounds + 1):  # the first round warms up
        draw = random.Random(number)
        prompt = [draw.randrange(1000, int(about["vocab"]) // 2) for _ in range(length)]
        floor = about["floor_bytes"] / engines.measure("pronk", [], 0)[0]
        for name in draw.sample(names, len(names)):
            times = engines.measure(name, prompt, tokens)
            if number:
                first[name].append(times[0])
                later[name].append((times[-1] - times[0]) / (len(times) - 1))
        if number:
            floors.append(floor)
    floor_ms = 1e3 * statistics.median(floors)
    print(f"\nprompt of {length} tokens, {rounds} rounds; floor {floor_ms:.2f} ms a token")
    for title, times in (("first token", first), ("a later token", later)):
        best = [min(times[name][i] for name in names[1:]) for i in range(rounds)]
        for name in names:
            ratios = [faster / own for faster, own in zip(best, times[name], strict=True)]
            line = f"{title:14} {name:16} {1e3 * statistics.median(times[name]):9.2f} ms"
            if name == "pronk":
                line += f"   speed {describe(ratios)} of llama.cpp's"
            if title != "first token":
                multiples = [own / floor for own, floor in zip(times[name], floors, strict=True)]
                line += f"   {describe(multiples)} x floor"
            print(line)
    return {"floor": floors, "first": first, "later": later}


def describe(values: Sequence[float]) -> str:
    """Return the median of some values, with the 10th and 90th percentiles in brackets."""
    ordered = sorted(values)
    last = len(ordered) - 1
    low = ordered[round(0.1 * last)]
    high = ordered[round(0.9 * last)]
    return f"{statistics.median(ordered):.3f} [{low:.3f}, {high:.3f}]"


if __name__ == "__main__":
    main()
