"""Loop of a limited child process: a line for each request, and a line for its reply.

:mod:`pronk.tokenization.limited_process` starts it. The arguments are the file of a program, which has a function
``answer``; the time limit of a request in seconds; and the maximum size of the address space in bytes. The first line
of the output is ``ready``. At a limit, the process ends without a reply.
"""

from __future__ import annotations

import contextlib
import faulthandler
import runpy
import signal
import sys
from collections.abc import Callable


def _main(program: str, time_limit: float, memory_limit: int) -> None:
    answer: Callable[[bytes], bytes] = runpy.run_path(program)["answer"]
    # Limit the address space where the system enforces it (Linux). Without it, the time limit still holds.
    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource  # noqa: PLC0415 - not on Windows

        resource.setrlimit(resource.RLIMIT_AS, (memory_limit, memory_limit))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent process handles Ctrl-C, and may go on
    reply = b"ready"
    while True:
        sys.stdout.buffer.write(reply + b"\n")
        sys.stdout.buffer.flush()
        line = sys.stdin.buffer.readline()
        if not line:
            break
        # A C thread ends this process at the time limit, even within one operation of Python ('x' * 10**10).
        faulthandler.dump_traceback_later(time_limit, exit=True)
        reply = answer(line)
        faulthandler.cancel_dump_traceback_later()


if __name__ == "__main__":
    _main(sys.argv[1], float(sys.argv[2]), int(sys.argv[3]))
