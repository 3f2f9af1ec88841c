"""What the server asks a replica, and what that says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from pronk.async_llm import EngineLoad
from pronk.outputs import Piece
from pronk.sampling.params import SamplingParams
from pronk.speculation.proposer import Drafter

__all__ = ["GenerateRequest", "ReplicaInfo", "RequestAccepted", "RequestFailed", "Said", "StepReply"]


@dataclass(frozen=True)
class ReplicaInfo:
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
class GenerateRequest:
    """Prompts to be continued side by side.

    Attributes:
        prompts: token ids.
        params: with a seed.
        prefix: digests of the first prompt's blocks, by which it finds a replica that has read them before.
        model: that they are for, as :class:`ReplicaInfo` says it.
        identity: of the replica that has given pieces out; another one must not go on.
        avoid: names of replicas that cannot go on, if there are others.
        given: these pieces, by the sample's index.
        drafter, priority, deadline, salt, tenant: see :meth:`pronk.async_llm.AsyncLLM.steps`.
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
class RequestAccepted:
    """A replica has taken a request in.

    Attributes:
        replica: its name.
        identity: see :class:`ReplicaInfo`.
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
class StepReply:
    """What a step has brought.

    Attributes:
        pieces: of the samples.
        load: what the replica is busy with.
    """

    pieces: list[Piece]
    load: EngineLoad


@dataclass(frozen=True)
class RequestFailed:
    """The request has ended with an error of its own, which it would have anywhere."""

    error: Exception


Said = RequestAccepted | StepReply | RequestFailed
