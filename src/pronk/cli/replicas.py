"""Options for models that are several times there. typer wants the real types: no postponed annotations here."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pronk.errors import OptionError

if TYPE_CHECKING:
    from pronk.cli.console import TerminalOutput
    from pronk.replicas.cluster import ReplicaPlan
    from pronk.replicas.dispatcher import Dispatcher

__all__ = ["ReplicaOptions", "needs_ray", "replica_options"]


def _ray(help: str, **more: Any) -> Any:  # noqa: A002 - typer's word
    return typer.Option(help=help, rich_help_panel="Replicas", **more)


@dataclass(frozen=True)
class ReplicaOptions:
    """How often a model is there.

    Attributes:
        replicas: the most of them.
        least: the fewest; ``None`` is always all.
        address: of a Ray cluster; ``None`` is this machine.
    """

    replicas: int
    least: int | None = None
    address: str | None = None

    def __bool__(self) -> bool:
        """Whether it is elsewhere than in this process."""
        return self.replicas > 1 or self.address is not None

    @contextmanager
    def front(
        self,
        screen: "TerminalOutput",
        options: dict[str, Any],
        *,
        also: Sequence[str] = (),
        max_requests: int = 1024,
        drain: float = 60.0,
    ) -> "Iterator[Dispatcher]":
        """Replicas, started for as long as they are wanted, and what stands before them.

        Raises:
            OptionError: there is no Ray, no such cluster, or no core for each of them.
            PronkError: they cannot load the model.
        """
        with self.cluster(screen, options, also=also, max_requests=max_requests, drain=drain) as (path, plan):
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
        *,
        also: Sequence[str] = (),
        max_requests: int = 1024,
        drain: float = 60.0,
    ) -> "Iterator[tuple[Path, ReplicaPlan]]":
        """A cluster for as long as it is wanted, with the model's place and what is to be there; errors likewise."""
        plan = self.plan(options, also, max_requests, drain)
        from pronk.models.loader import resolve_model
        from pronk.replicas.cluster import connect, leave

        path = resolve_model(options["model"])
        screen.note(f"starting {self.replicas} replica{'s' if self.replicas > 1 else ''} of {path.name}")
        try:
            connect(self.address, _cores())
            yield path, plan
        finally:
            leave()

    def plan(self, options: dict[str, Any], also: Sequence[str], max_requests: int, drain: float) -> "ReplicaPlan":
        """What each replica loads, and with how many cores; errors are those of :meth:`front`."""
        needs_ray()
        from pronk.drafters import make_drafter

        for spec in (options["drafter"], *also):  # what is wrong with one shows before anything begins
            make_drafter(spec)

        if not isinstance(options["calibration"], bool):
            msg = f"calibration: expected on or off with replicas, as each has its own, found {options['calibration']}"
            raise OptionError(msg)
        workers, threads, cores = options["workers"], options["threads"], _cores()
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
        model = options["model"]
        # Replicas have working directories of their own.
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
    replicas: Annotated[int, _ray("How many times to have the model, each in a process of its own.", min=1)] = 1,
    min_replicas: Annotated[
        int | None, _ray("How many of them at quiet times.", show_default="all of them", min=1)
    ] = None,
    ray_address: Annotated[
        str | None,
        _ray("The Ray cluster for them, as ray.init has it.", show_default="this machine", metavar="ADDRESS"),
    ] = None,
) -> ReplicaOptions:
    """How often a model is there, and where.

    Raises:
        OptionError: there are to be more at quiet times than at others.
    """
    if min_replicas is not None and min_replicas > replicas:
        msg = f"min-replicas: expected at most the replicas, {replicas}, found {min_replicas}"
        raise OptionError(msg)
    return ReplicaOptions(replicas, min_replicas, ray_address)


def needs_ray() -> None:
    """Hold a command to what it needs.

    Raises:
        OptionError: the extra ``ray`` is not installed.
    """
    from importlib.util import find_spec

    if find_spec("ray") is None:
        msg = "replicas: expected Ray, found no such package; run: pip install 'pronk[ray]'"
        raise OptionError(msg)


def _cores() -> int:
    import os

    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity is not None else os.cpu_count() or 1
