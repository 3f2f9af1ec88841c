"""Worker processes that start in milliseconds: forks of one process that has imported torch.

A new interpreter takes seconds of processor time to import what a worker needs. Tests of other
things than the start of a process take a fork instead, which runs the same program with the same
arguments.
"""

import multiprocessing
import os
import sys
from collections.abc import Sequence
from functools import cache
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from subprocess import PIPE

PRELOADED = ["pronk.cli.main", "pronk.llm", "pronk.parallel.processes"]


@cache
def fork_server() -> ForkServerContext:
    """Return the context of the server, a process that multiprocessing starts with the first
    fork.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


class ForkedProcess:
    """What a driver uses of ``subprocess.Popen``, for the command ``[interpreter, "-c", program,
    *arguments]``.
    """

    def __init__(self, command: Sequence[str], stdin: int) -> None:
        _, option, program, *arguments = command
        assert (option, stdin) == ("-c", PIPE)
        reader, self.stdin = fork_server().Pipe(duplex=False)
        self._process = fork_server().Process(
            target=run_program, args=(reader, program, arguments), daemon=True
        )
        self._process.start()
        reader.close()
        self.pid = self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def kill(self) -> None:
        self._process.kill()

    def wait(self) -> None:
        self._process.join()


def run_program(standard_input: Connection, program: str, arguments: Sequence[str]) -> None:
    """Run a program as ``python -c`` would."""
    os.dup2(standard_input.fileno(), 0)
    standard_input.close()
    sys.argv = ["-c", *arguments]
    exec(program, {"__name__": "__main__"})
