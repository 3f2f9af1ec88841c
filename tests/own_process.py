"""Tests that run in a process of their own, so that their changes of the process do not last."""

import multiprocessing
import warnings
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec

Parameters = ParamSpec("Parameters")


def in_own_process(test: Callable[Parameters, None]) -> Callable[Parameters, None]:
    """Run a test in a fork of this process; its traceback is on stderr.

    Tests with many threads need a process of their own, because the kernels' thread pool never
    shrinks, and all its threads wake up and spin in each run. On two cores, after a run with 8
    threads, each later run with 3 threads would take ten times as long.
    """

    @wraps(test)
    def run(*args: Parameters.args, **options: Parameters.kwargs) -> None:
        child = multiprocessing.get_context("fork").Process(target=test, args=args, kwargs=options)
        with warnings.catch_warnings():
            warnings.filterwarnings(
                "ignore", "This process .* is multi-threaded", DeprecationWarning
            )
            child.start()
        child.join()
        assert child.exitcode == 0

    return run
