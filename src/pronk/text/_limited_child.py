"""Loop of a limited child process: it reads a line for each request, and writes a line in reply.

:mod:`pronk.text.limited_process` starts this program. The arguments of the program are a Python
file with a function ``answer``; the maximum time of a request in seconds, waiting included; and the
maximum size of the address space in bytes. The first line of the output is ``ready``. A request
begins with its number and its maximum processor time in seconds. A reply begins with the same
number and the processor time that the request took in seconds::

    7 4.0 {"x": 1}  ->  7 0.002 {"y": 2}

At a limit, the process ends without a reply.
"""

from __future__ import annotations

import contextlib
import faulthandler
import runpy
import signal
import sys
import time
from collections.abc import Callable


def _main(program: str, time_limit: float, memory_limit: int) -> None:
    answer: Callable[[bytes], bytes] = runpy.run_path(program)["answer"]
    # Limit the address space, which only Linux enforces. Other systems have the time limit alone.
    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource  # noqa: PLC0415 - not on Windows

        resource.setrlimit(resource.RLIMIT_AS, (memory_limit, memory_limit))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent process handles Ctrl-C
    reply = b"ready"
    while True:
        sys.stdout.buffer.write(reply + b"\n")
        sys.stdout.buffer.flush()
        line = sys.stdin.buffer.readline()
        if not line:
            break
        number, seconds, request = line.split(b" ", 2)
        start = time.process_time()
        _limit_time(float(seconds), time_limit)
        answered = answer(request)
        _end_limits()
        taken = time.process_time() - start
        reply = b"%b %.6f %b" % (number, taken, answered)


def _limit_time(seconds: float, time_limit: float) -> None:
    """Let the system end this process after ``seconds`` of processor time, or after ``time_limit``.

    Both limits hold even within a single operation such as ``'x' * 10**10``. Processor time does
    not depend on other programs; at its limit, the system sends ``SIGPROF``. ``time_limit`` counts
    waiting, too. Windows has no timer of processor time, so that ``seconds`` count waiting there.
    """
    if sys.platform == "win32":
        time_limit = seconds
    else:
        signal.setitimer(signal.ITIMER_PROF, seconds)
    # its thread needs no lock of Python, so it also ends a busy process
    faulthandler.dump_traceback_later(time_limit, exit=True)


def _end_limits() -> None:
    if sys.platform != "win32":
        signal.setitimer(signal.ITIMER_PROF, 0)
    faulthandler.cancel_dump_traceback_later()


if __name__ == "__main__":
    _main(sys.argv[1], float(sys.argv[2]), int(sys.argv[3]))
