"""Options for running several replicas of a model, in processes that Ray manages."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pronk import OptionError
from pronk.base import count_text
from pronk.base.checks import install_extra, require_extra
from pronk.commands import panel

if TYPE_CHECKING:
    from pronk.commands import TerminalOutput
    from pronk.server.replicas.cluster import ReplicaPlan

_replica_option = panel("Replicas")


@dataclass(frozen=True, kw_only=True)
class ReplicaOptions:
    """Options of the command line for replicas.

    Raises:
        OptionError: --min-replicas is larger than --replicas.
    """

    replicas: Annotated[
        int, _replica_option("Number of replicas of the model, each in its own process.", min=1)
    ] = 1
    min_replicas: Annotated[
        int | None,
        _replica_option("Number of replicas to keep under low load.", show_default="all", min=1),
    ] = None
    ray_address: Annotated[
        str | None,
        _replica_option(
            "Address of a Ray cluster, as for ray.init.",
            show_default="this machine",
            metavar="ADDRESS",
        ),
    ] = None

    def __post_init__(self) -> None:
        if self.min_replicas is not None and self.min_replicas > self.replicas:
            msg = (
                f"min-replicas: expected at most --replicas ({self.replicas}), found "
                f"{self.min_replicas}; use fewer"
            )
            raise OptionError(msg)

    def __bool__(self) -> bool:
        """Whether the model runs in replicas rather than in this process."""
        return self.replicas > 1 or self.ray_address is not None

    @contextmanager
    def connect(
        self,
        screen: "TerminalOutput",
        options: dict[str, Any],
        *,
        extra_drafters: Sequence[str] = (),
        max_requests: int = 1024,
        drain: float = 60.0,
    ) -> "Iterator[tuple[Path, ReplicaPlan]]":
        """Connect to the Ray cluster, or start one, within the ``with`` block.

        Yields the path of the model and the plan of the replicas.

        Args:
            screen: terminal, for a note that replicas start.
            options: keyword arguments of :class:`pronk.LLM`.
            extra_drafters: drafters that requests may select besides the default one.
            max_requests: maximum number of samples in progress.
            drain: seconds in which a stopping replica may finish its requests.

        Raises:
            OptionError: Ray is not installed, the cluster cannot be reached, or there are too few
                cores.
        """
        require_extra("replicas", "ray", "ray")
        plan = self._plan(options, extra_drafters, max_requests, drain)
        import ray

        from pronk.checkpoint import model_label, resolve_model
        from pronk.server.replicas.cluster import connect

        path = resolve_model(options["model"])
        screen.note(f"starting {count_text(self.replicas, 'replica')} of {model_label(path)}")
        try:
            connect(self.ray_address, _num_cores())
            yield path, plan
        finally:
            ray.shutdown()  # disconnect, and stop a cluster that was started on this machine

    def _plan(
        self,
        options: dict[str, Any],
        extra_drafters: Sequence[str],
        max_requests: int,
        drain: float,
    ) -> "ReplicaPlan":
        """Check the options before the cluster starts, and return the plan of the replicas."""
        from pronk.drafting import make_drafter

        for spec in (options["drafter"], *extra_drafters):
            make_drafter(spec)  # raises for an unknown drafter
        if not isinstance(options["calibration"], bool):
            msg = (
                f"calibration: expected on or off with replicas, found {options['calibration']}; "
                "leave the file out"
            )
            raise OptionError(msg)
        workers = options["workers"]
        threads = options["threads"]
        model = options["model"]
        if model is not None and Path(model).exists():
            # An absolute path is also valid on a machine without this working directory.
            model = str(Path(model).resolve())
        if self.ray_address is None:
            threads = self._fit_threads(workers, threads)
            from pronk.server.replicas import be_private

            be_private()  # sets environment variables that Ray reads when it is imported
        try:
            from pronk.server.replicas.cluster import ReplicaPlan
        except ImportError as error:
            msg = (
                f"replicas: expected Ray Serve, found no package {error.name}; "
                f"{install_extra('ray')}"
            )
            raise OptionError(msg) from error

        llm_options = {**options, "threads": threads, "model": model}
        cores = float(workers * (threads or 1))
        return ReplicaPlan(
            options=llm_options,
            replicas=self.replicas,
            min_replicas=self.min_replicas,
            extra_drafters=tuple(extra_drafters),
            max_requests=max_requests,
            drain=drain,
            cpus=cores,
        )

    def _fit_threads(self, workers: int, threads: int | None) -> int:
        """Return the number of threads per worker; ``None`` divides the cores among the workers.

        Raises:
            OptionError: the replicas need more cores than this machine has.
        """
        cores = _num_cores()
        threads = threads or max(1, cores // (self.replicas * workers))
        per_replica = workers * threads
        if self.replicas * per_replica > cores:
            limit = max(1, cores // per_replica)
            msg = (
                f"replicas: expected at most {limit} of {per_replica} threads each on the {cores} "
                f"cores of this machine, found {self.replicas}; use fewer, or --threads, or "
                "--ray-address"
            )
            raise OptionError(msg)
        return threads


def _num_cores() -> int:
    """Return the number of logical cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
