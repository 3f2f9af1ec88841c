"""Seconds and peak memory of loading a model with ``LLM(path)``, in new processes.

    python benchmarks/loading.py MODEL                         # a folder or GGUF file
    python benchmarks/loading.py MODEL --busy                  # also while another process computes
    python benchmarks/loading.py MODEL --llama-cpp             # also llama.cpp (a GGUF file)
    python benchmarks/loading.py MODEL --weight-cache FOLDER   # also with packed weights on disk

The first round is not counted, because it may run the self-check, and fills the page cache. Memory
is what the load adds to that of the import, relative to the size of the file (Linux): at its peak
and after the load, both with the pages of mapped files, and after the load without them. Seconds
are medians, with the minimum and maximum in brackets; memory is a median. The last line is one JSON
object.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from pronk.lab.bench.machine import describe_hardware

_MEASURE = """
import json, re, sys, time
from pathlib import Path
def resident(key):
    return int(re.search(key + r":\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) * 1024
if sys.argv[1] == "pronk":
    from pronk import LLM
    options = {"weight_cache": sys.argv[4]} if sys.argv[4] else {}
    load = lambda: LLM(sys.argv[2], threads=int(sys.argv[3]), **options)
else:
    from llama_cpp import Llama
    load = lambda: Llama(sys.argv[2], n_threads=int(sys.argv[3]), verbose=False)
Path("/proc/self/clear_refs").write_text("5")  # the peak of the import does not count
before = resident("VmRSS"), resident("RssAnon")
began = time.perf_counter()
model = load()
seconds = time.perf_counter() - began
peak, after = resident("VmHWM") - before[0], resident("VmRSS") - before[0]
print(json.dumps([seconds, peak, after, resident("RssAnon") - before[1]]))
"""

_MEMORY = ("memory at the peak", "memory after the load", "… without pages of mapped files")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--busy", action="store_true")
    parser.add_argument("--llama-cpp", action="store_true")
    parser.add_argument("--weight-cache", default="", help="a folder")
    options = parser.parse_args()
    engines = {"pronk": ("pronk", "")}
    if options.weight_cache:
        engines["pronk, weight cache"] = ("pronk", options.weight_cache)
    if options.llama_cpp:
        engines["llama.cpp"] = ("llama.cpp", "")
    files = [options.model]
    if options.model.is_dir():
        files = sorted(options.model.glob("*.safetensors"))
    size = sum(file.stat().st_size for file in files)
    processor = describe_hardware("cpu")["processor"]
    print(f"{options.model.name}, {size / 1e6:.0f} MB, {options.threads} threads, {processor}")
    found: dict[str, list[list[float]]] = {}
    for number in range(options.rounds + 1):
        for engine, arguments in engines.items():
            for busy in (False, True) if options.busy else (False,):
                name = f"{engine}, beside a busy process" if busy else engine
                figures = measure(*arguments, options.model, options.threads, busy=busy)
                if number:
                    found.setdefault(name, []).append(figures)
    for name, rounds in found.items():
        seconds = [each[0] for each in rounds]
        spread = f"[{min(seconds):.2f}, {max(seconds):.2f}]"
        times = f"{statistics.median(seconds):6.2f} s {spread}"
        print(f"{name:44} {times}")
        for kind, figures in zip(_MEMORY, [*zip(*rounds, strict=True)][1:], strict=True):
            memory = statistics.median(figures)
            print(f"{'':4}{kind:40} {memory / 1e6:6.0f} MB, {memory / size:.3f} of the file")
    model = options.model.name
    report = {"model": model, "bytes": size, "processor": processor, "rounds": found}
    print(json.dumps(report))


def measure(
    engine: str, weight_cache: str, model: Path, threads: int, *, busy: bool
) -> list[float]:
    """Load a model in a new process; return the seconds and the bytes of each kind of memory.

    With ``busy``, a second process keeps one core busy meanwhile.
    """
    other = subprocess.Popen([sys.executable, "-c", "while True: pass"]) if busy else None
    try:
        command = [sys.executable, "-c", _MEASURE, engine, str(model), str(threads), weight_cache]
        run = subprocess.run(command, check=True, capture_output=True, text=True)  # noqa: S603
    finally:
        if other is not None:
            with suppress(OSError):
                other.kill()
            other.wait()
    figures: list[float] = json.loads(run.stdout.splitlines()[-1])
    return figures


if __name__ == "__main__":
    main()
