"""Files of requests answered by replicas, through Ray Data."""

from __future__ import annotations

import asyncio
import json
import logging
import os
from collections.abc import Callable, Iterable, Mapping
from http import HTTPStatus
from itertools import islice
from math import ceil
from typing import Any
from warnings import catch_warnings, simplefilter

import numpy as np
import ray
from numpy.typing import NDArray
from ray.data import ActorPoolStrategy, DataContext
from ray.exceptions import RayError

from pronk.async_llm import AsyncLLM
from pronk.errors import ClosedError, PronkError
from pronk.llm import LLM
from pronk.parallel.connection import ConnectionLostError
from pronk.replicas.cluster import ReplicaPlan, cause_of, check_cores
from pronk.replicas.replica import enter
from pronk.server.batch import BatchLine, BatchOutput, answer_line
from pronk.server.service import Service
from pronk.server.settings import RequestLimits, ServerSettings

__all__ = ["run_on_replicas"]

Rows = Mapping[str, NDArray[Any]]

# Portions that a replica has at a time. Each is half of the requests that share its passes: answers of a portion are
# written together, and as long as there are others its passes are full.
_PORTIONS = 4
# Requests that are in Ray's hands at a time; for the next ones the model is loaded again.
_PART = 2**14
# How often a replica may die before that is not bad luck any more.
_RESTARTS = 100


class BatchReplica:
    """One replica."""

    def __init__(self, options: Mapping[str, Any], name: str, folder: str) -> None:
        """Load the model.

        Args:
            options: of :class:`pronk.LLM`.
            name: what requests call it.
            folder: that paths in the options start from.
        """
        enter(folder)
        llm, limits = LLM(**options), RequestLimits(requests=2**20, n=1024, seconds=1e6)
        self._service = Service(AsyncLLM(llm, max_requests=limits.requests), ServerSettings(name=name, limits=limits))

    def __call__(self, rows: Rows) -> Rows:
        """Answer some requests, side by side with those of other threads."""
        lines = [
            BatchLine(*each[:2], json.loads(each[2]))
            for each in zip(rows["id"], rows["url"], rows["body"], strict=True)
        ]

        async def main() -> list[tuple[int, dict[str, Any]]]:
            return await asyncio.gather(*(answer_line(self._service, line) for line in lines))

        try:
            said = asyncio.run(main())
        except (ClosedError, ConnectionLostError):
            os._exit(1)  # of no more use: Ray begins another one, which is asked again
        return {
            "id": np.array([line.custom_id for line in lines], object),
            "status": np.array([int(status) for status, _ in said], np.int64),
            "body": np.array([json.dumps(body, ensure_ascii=False) for _, body in said], object),
        }


def run_on_replicas(
    plan: ReplicaPlan,
    name: str,
    lines: Iterable[BatchLine],
    answers: BatchOutput,
    progress: Callable[[], None] = lambda: None,
) -> int:
    """Answer what has no answer yet, by replicas of which some may die, and write the answers as they come.

    Args:
        plan: what they load, and how many they are.
        name: of the model, as requests call it.
        lines: the requests.
        answers: where answers go.
        progress: called with every answer.

    Returns:
        How many were refused.

    Raises:
        OptionError: the cluster has too few cores.
        PronkError: the replicas cannot load the model, or there is no room for an answer.
    """
    waiting = (
        {"id": line.custom_id, "url": line.url, "body": json.dumps(line.body)}
        for line in lines
        if line.custom_id not in answers.done
    )
    check_cores(plan)
    _be_quiet()
    refused = 0
    try:
        while part := list(islice(waiting, _PART)):
            for row in _answered(plan, name, part).iter_rows():
                answers.write(row["id"], row["status"], json.loads(row["body"]))
                refused += row["status"] != HTTPStatus.OK
                progress()
    except RayError as error:
        msg = f"replicas: expected answers, found that they ended: {cause_of(error)}; the same command goes on there"
        raise PronkError(msg) from error
    return refused


def _answered(plan: ReplicaPlan, name: str, waiting: list[dict[str, Any]]) -> Any:
    """The answers, as they will be."""
    portion = max(1, min(int(plan.options.get("max_batch", 16)) // 2, ceil(len(waiting) / plan.replicas)))
    with catch_warnings():
        simplefilter("ignore", DeprecationWarning)  # of how restarts are limited, for which there is no other way yet
        return ray.data.from_items(waiting, override_num_blocks=ceil(len(waiting) / portion)).map_batches(
            BatchReplica,
            fn_constructor_args=(dict(plan.options), name, plan.folder),
            batch_size=portion,
            compute=ActorPoolStrategy(
                min_size=plan.least or plan.replicas,
                max_size=plan.replicas,
                max_tasks_in_flight_per_actor=_PORTIONS,
                max_concurrent_calls_per_actor=_PORTIONS,
                enable_true_multi_threading=True,
            ),
            num_cpus=plan.cpus,
            max_restarts=_RESTARTS,
        )


def _be_quiet() -> None:
    context = DataContext.get_current()
    context.enable_progress_bars = False
    context.print_on_execution_start = False
    logging.getLogger("ray.data").setLevel(logging.ERROR)
