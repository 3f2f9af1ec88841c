"""Tests that run in a process of their own, so that what they change in it ends with them."""

import multiprocessing
import warnings
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec

Parameters = ParamSpec("Parameters")


def in_own_process(test: Callable[Parameters, None]) -> Callable[Parameters, None]:
    """Run a test in a fork of this process; its traceback is on stderr.

    Tests of many threads need it: the kernels' pool of threads never shrinks, and all its threads
    wake up and spin at each run that uses some of them. On two cores, after a run with 8 threads,
    those with 3 threads would take ten times as long in all later tests.
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
