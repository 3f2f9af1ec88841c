"""Options for several replicas of a model on Ray.

typer reads annotations at run time, so none are postponed.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pronk.cli.options import panel, require_extra
from pronk.errors import OptionError

if TYPE_CHECKING:
    from pronk.cli.console import TerminalOutput
    from pronk.replicas.cluster import ReplicaPlan
    from pronk.replicas.dispatcher import Dispatcher

__all__ = ["ReplicaOptions", "replica_options"]

_ray = panel("Replicas")


@dataclass(frozen=True)
class ReplicaOptions:
    """Number and place of the replicas of a model."""

    replicas: int  # maximum number of replicas
    least: int | None = None  # minimum number of replicas under low load; None always runs all of them
    address: str | None = None  # address of a Ray cluster; None starts one on this machine

    def __bool__(self) -> bool:
        """Whether the model runs outside this process."""
        return self.replicas > 1 or self.address is not None

    @contextmanager
    def front(
        self, screen: "TerminalOutput", options: dict[str, Any], also: Sequence[str], max_requests: int, drain: float
    ) -> "Iterator[Dispatcher]":
        """Start the replicas and yield their dispatcher; stop them at the end of the block.

        Raises:
            OptionError: Ray is not installed, the cluster cannot be reached, or there are too few cores.
            PronkError: a replica cannot load the model.
        """
        with self.cluster(screen, options, also, max_requests, drain) as (path, plan):
            from pronk.replicas.cluster import deploy
            from pronk.replicas.dispatcher import Dispatcher, ModelReader

            with deploy(plan) as deployed:
                reader = ModelReader(path, options["drafter"], deployed.about())
                yield Dispatcher(reader, deployed, max_requests=max_requests)

    @contextmanager
    def cluster(
        self,
        screen: "TerminalOutput",
        options: dict[str, Any],
        also: Sequence[str] = (),
        max_requests: int = 1024,
        drain: float = 60.0,
    ) -> "Iterator[tuple[Path, ReplicaPlan]]":
        """Connect to the cluster and yield the model's path and the plan; raises as :meth:`front` does."""
        plan = self.plan(options, also, max_requests, drain)
        import ray

        from pronk.models.loader import resolve_model
        from pronk.replicas.cluster import connect

        path = resolve_model(options["model"])
        screen.note(f"starting {self.replicas} replica{'s' if self.replicas > 1 else ''} of {path.name}")
        try:
            connect(self.address, _cores())
            yield path, plan
        finally:
            ray.shutdown()  # ends a local cluster

    def plan(self, options: dict[str, Any], also: Sequence[str], max_requests: int, drain: float) -> "ReplicaPlan":
        """Return the model, options and cores of each replica; raises as :meth:`front` does."""
        require_extra("replicas", "ray", "ray")
        from pronk.drafters import make_drafter

        for spec in (options["drafter"], *also):  # raises before the cluster starts
            make_drafter(spec)

        if not isinstance(options["calibration"], bool):
            msg = f"calibration: expected on or off with replicas, found {options['calibration']}; leave the file out"
            raise OptionError(msg)
        workers, threads, cores, model = options["workers"], options["threads"], _cores(), options["model"]
        if self.address is None:
            threads = threads or max(1, cores // (self.replicas * workers))
            if self.replicas * workers * threads > cores:
                most = max(1, cores // (workers * threads))
                msg = (
                    f"replicas: expected at most {most} of {workers * threads} threads each on the {cores} cores of "
                    f"this machine, found {self.replicas}; use fewer, or --threads, or --ray-address"
                )
                raise OptionError(msg)
        cpus = float(workers * (threads or 1))
        # A replica has another working directory, so a relative path becomes absolute.
        placed = str(Path(model).resolve()) if model is not None and Path(model).exists() else model
        own = {**options, "threads": threads, "model": placed}
        if self.address is None:
            from pronk.replicas.ray_security import be_private

            be_private()
        try:
            from pronk.replicas.cluster import ReplicaPlan
        except ImportError as error:
            msg = f"replicas: expected Ray Serve, found no package {error.name}; run: pip install 'pronk[ray]'"
            raise OptionError(msg) from error

        return ReplicaPlan(own, self.replicas, self.least, tuple(also), max_requests, drain, cpus)


def replica_options(
    *,
    replicas: Annotated[int, _ray("Number of replicas of the model, each in its own process.", min=1)] = 1,
    min_replicas: Annotated[
        int | None, _ray("Number of replicas to keep under low load.", show_default="all", min=1)
    ] = None,
    ray_address: Annotated[
        str | None,
        _ray("Address of a Ray cluster, as for ray.init.", show_default="this machine", metavar="ADDRESS"),
    ] = None,
) -> ReplicaOptions:
    """Build the options of the replicas.

    Raises:
        OptionError: --min-replicas is larger than --replicas.
    """
    if min_replicas is not None and min_replicas > replicas:
        msg = f"min-replicas: expected at most the replicas, {replicas}, found {min_replicas}; use fewer"
        raise OptionError(msg)
    return ReplicaOptions(replicas, min_replicas, ray_address)


def _cores() -> int:
    import os

    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity is not None else os.cpu_count() or 1
