"""What the server asks a replica, and what that says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from pronk.aio import Load
from pronk.choosing.params import SamplingParams
from pronk.drafters.base import Drafter
from pronk.outputs import Piece

__all__ = ["About", "Ask", "Begun", "Failed", "Said", "Step"]


@dataclass(frozen=True)
class About:
    """What a replica is.

    Attributes:
        identity: of whatever its tokens depend on: the model, its weights' form, the kernels. Replicas with the same
            one give the same text for the same seed.
        model: the part of it that says which model it is, whatever computes it.
        kernels: what computes.
        drafter: what guesses, by its name.
    """

    identity: str
    model: str
    kernels: str
    drafter: str


@dataclass(frozen=True)
class Ask:
    """Prompts to be continued side by side.

    Attributes:
        prompts: token ids.
        params: with a seed.
        prefix: digests of the first prompt's blocks, by which it finds a replica that has read them before.
        model: that they are for, as :class:`About` says it.
        identity: of the replica that has given pieces out; another one must not go on.
        avoid: names of replicas that cannot go on, if there are others.
        given: these pieces, by the sample's index.
        drafter, priority, deadline, salt, tenant: see :meth:`pronk.aio.AsyncLLM.steps`.
    """

    prompts: Sequence[list[int]]
    params: SamplingParams
    prefix: Sequence[bytes] = ()
    model: str = ""
    identity: str | None = None
    given: Mapping[int, Sequence[Piece]] = field(default_factory=dict)
    drafter: Drafter | None = None
    priority: int = 0
    deadline: float | None = None
    salt: bytes = b""
    tenant: str = ""
    avoid: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Begun:
    """A replica has taken a request in.

    Attributes:
        replica: its name.
        identity: see :class:`About`.
        exact: whether a text's bits depend on itself alone; otherwise nobody else can go on with it.
        node: of the cluster, by Ray's name.
        process: its number there.
    """

    replica: str
    identity: str
    exact: bool = True
    node: str = ""
    process: int = 0


@dataclass(frozen=True)
class Step:
    """What a step has brought.

    Attributes:
        pieces: of the samples.
        load: what the replica is busy with.
    """

    pieces: list[Piece]
    load: Load


@dataclass(frozen=True)
class Failed:
    """The request has ended with an error of its own, which it would have anywhere."""

    error: Exception


Said = Begun | Step | Failed
