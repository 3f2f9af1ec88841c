"""Processing of batch files on replicas: Ray Data divides a file into blocks of requests."""

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

from pronk import LLM, ClosedError, PronkError
from pronk.base import ConnectionLostError
from pronk.server.batch import BatchLine, BatchOutput, answer_line, batch_service
from pronk.server.replicas.cluster import ReplicaPlan, cause_of, check_cores
from pronk.server.replicas.replica import change_directory

Rows = Mapping[str, NDArray[Any]]

# Number of blocks that a replica processes at the same time. A block has max_batch / 2 requests and
# ends with its last answer. With four blocks, 2 · max_batch requests, the engine's batch stays full
# while the last answers are missing.
_BLOCKS_PER_REPLICA = 4
# Maximum number of requests per Ray dataset. Each dataset loads the model again.
_MAX_RUN_REQUESTS = 2**14
_MAX_RESTARTS = 100  # maximum number of restarts of a replica after its process has ended


class BatchReplica:
    """A replica of the model, in an actor process of Ray Data."""

    def __init__(self, options: Mapping[str, Any], name: str, folder: str) -> None:
        """Load the model in the working directory ``folder``.

        ``name`` is the model's name in requests.
        """
        change_directory(folder)
        self._service = batch_service(LLM(**options), name)

    def __call__(self, rows: Rows) -> Rows:
        """Answer one block of requests.

        Ray Data calls a replica from several threads, which share the engine.
        """
        columns = zip(rows["id"], rows["url"], rows["body"], strict=True)
        lines = [BatchLine(custom_id, url, json.loads(body)) for custom_id, url, body in columns]

        async def answer_lines() -> list[tuple[int, dict[str, Any]]]:
            return await asyncio.gather(*(answer_line(self._service, line) for line in lines))

        try:
            answers = asyncio.run(answer_lines())
        except (ClosedError, ConnectionLostError):
            # The engine has stopped. After the exit, Ray starts another replica, which answers the
            # whole block.
            os._exit(1)
        ids = [line.custom_id for line in lines]
        statuses = [int(status) for status, _ in answers]
        bodies = [json.dumps(body, ensure_ascii=False) for _, body in answers]
        return {
            "id": np.array(ids, object),
            "status": np.array(statuses, np.int64),
            "body": np.array(bodies, object),
        }


def run_on_replicas(
    plan: ReplicaPlan,
    name: str,
    lines: Iterable[BatchLine],
    answers: BatchOutput,
    progress: Callable[[], None] = lambda: None,
) -> int:
    """Answer the requests of a batch file on replicas.

    Args:
        plan: number, resources and options of the replicas.
        name: name of the model in requests.
        lines: requests of the file; those with an answer are skipped.
        answers: output file, with the answers of earlier runs.
        progress: called after each new answer.

    Returns:
        Number of new answers with an HTTP status other than 200.

    Raises:
        OptionError: the cluster has too few cores.
        PronkError: the replicas cannot load the model, or an answer cannot be written.
    """
    lines_left = (line for line in lines if line.custom_id not in answers.answered_ids)
    unanswered = (
        {"id": line.custom_id, "url": line.url, "body": json.dumps(line.body)}
        for line in lines_left
    )
    check_cores(plan)
    context = DataContext.get_current()
    context.enable_progress_bars = False
    context.print_on_execution_start = False
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    num_errors = 0
    try:
        while requests := list(islice(unanswered, _MAX_RUN_REQUESTS)):
            for row in _dataset(plan, name, requests).iter_rows():
                answers.write(row["id"], row["status"], json.loads(row["body"]))
                num_errors += row["status"] != HTTPStatus.OK
                progress()
    except RayError as error:
        msg = (
            f"replicas: expected answers, found an error: {cause_of(error)}; run the same command "
            "again to continue"
        )
        raise PronkError(msg) from error
    return num_errors


def _dataset(plan: ReplicaPlan, name: str, requests: list[dict[str, Any]]) -> Any:
    """Return the Ray dataset of the answers to requests; an iteration computes the answers."""
    half_batch = int(plan.options.get("max_batch", 16)) // 2
    per_replica = ceil(len(requests) / plan.replicas)
    block_size = max(1, min(half_batch, per_replica))
    num_blocks = ceil(len(requests) / block_size)
    with catch_warnings():
        # Ray has deprecated max_restarts without a replacement.
        simplefilter("ignore", DeprecationWarning)
        return ray.data.from_items(requests, override_num_blocks=num_blocks).map_batches(
            BatchReplica,
            fn_constructor_args=(dict(plan.options), name, plan.folder),
            batch_size=block_size,
            compute=ActorPoolStrategy(
                min_size=plan.min_replicas or plan.replicas,
                max_size=plan.replicas,
                max_tasks_in_flight_per_actor=_BLOCKS_PER_REPLICA,
                max_concurrent_calls_per_actor=_BLOCKS_PER_REPLICA,
                enable_true_multi_threading=True,
            ),
            num_cpus=plan.cpus,
            max_restarts=_MAX_RESTARTS,
        )
