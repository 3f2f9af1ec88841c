"""Files of requests answered by replicas, through Ray Data."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Iterable, Mapping
from http import HTTPStatus
from typing import Any

import numpy as np
import ray
from numpy.typing import NDArray
from ray.data import ActorPoolStrategy, DataContext
from ray.exceptions import RayError

from pronk.aio import AsyncLLM
from pronk.errors import PronkError
from pronk.llm import LLM
from pronk.replicas.cluster import Plan, line_of
from pronk.server.batch import Answers, Line, answer_line
from pronk.server.service import Service
from pronk.server.settings import Limits, Settings

__all__ = ["run_on_replicas"]

Rows = Mapping[str, NDArray[Any]]

# Requests that a replica gets at a time, in multiples of those that share its passes: when the last ones of them end,
# its passes are not full.
_AT_A_TIME = 8
# How often a replica may die before that is not bad luck any more.
_RESTARTS = 100


class Answerer:
    """One replica."""

    def __init__(self, options: Mapping[str, Any], name: str) -> None:
        """Load the model: ``options`` are those of :class:`pronk.LLM`, ``name`` is what requests call it."""
        llm, limits = LLM(**options), Limits(requests=2**20, n=1024, seconds=1e6)
        self._service = Service(AsyncLLM(llm, max_requests=limits.requests), Settings(name=name, limits=limits))

    def __call__(self, rows: Rows) -> Rows:
        """Answer some requests, all of them side by side."""
        lines = [
            Line(*each[:2], json.loads(each[2])) for each in zip(rows["id"], rows["url"], rows["body"], strict=True)
        ]

        async def main() -> list[tuple[int, dict[str, Any]]]:
            return await asyncio.gather(*(answer_line(self._service, line) for line in lines))

        said = asyncio.run(main())
        return {
            "id": np.array([line.custom_id for line in lines], object),
            "status": np.array([int(status) for status, _ in said], np.int64),
            "body": np.array([json.dumps(body, ensure_ascii=False) for _, body in said], object),
        }


def run_on_replicas(
    plan: Plan, name: str, lines: Iterable[Line], answers: Answers, progress: Callable[[], None] = lambda: None
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
        PronkError: the replicas cannot load the model, or there is no room for an answer.
    """
    waiting = [
        {"id": line.custom_id, "url": line.url, "body": json.dumps(line.body)}
        for line in lines
        if line.custom_id not in answers.done
    ]
    _be_quiet()
    at_a_time = _AT_A_TIME * int(plan.options.get("max_batch", 16))
    made = ray.data.from_items(waiting, override_num_blocks=max(1, len(waiting) // at_a_time)).map_batches(
        Answerer,
        fn_constructor_args=(dict(plan.options), name),
        batch_size=at_a_time,
        compute=ActorPoolStrategy(min_size=plan.least or plan.replicas, max_size=plan.replicas),
        num_cpus=plan.cpus,
        max_restarts=_RESTARTS,
    )
    refused = 0
    try:
        for row in made.iter_rows():
            answers.write(row["id"], row["status"], json.loads(row["body"]))
            refused += row["status"] != HTTPStatus.OK
            progress()
    except RayError as error:
        msg = f"replicas: expected answers, found that they ended: {line_of(error)}; the same command goes on there"
        raise PronkError(msg) from error
    return refused


def _be_quiet() -> None:
    context = DataContext.get_current()
    context.enable_progress_bars = False
    context.print_on_execution_start = False
    logging.getLogger("ray.data").setLevel(logging.ERROR)
