"""Messages between the dispatcher and the replicas."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from pronk.async_llm import EngineLoad
from pronk.outputs import Piece
from pronk.sampling.params import SamplingParams
from pronk.speculation.proposer import Drafter

__all__ = ["GenerateRequest", "ReplicaInfo", "ReplicaMessage", "RequestAccepted", "RequestFailed", "StepReply"]


@dataclass(frozen=True)
class ReplicaInfo:
    """Description of a replica."""

    # Everything that the tokens depend on: model, format of the weights, kernels. Replicas with equal identities
    # generate the same text for the same seed.
    identity: str
    model: str  # the identity without the kernels
    kernels: str  # name of the kernels
    drafter: str  # name of the default drafter


@dataclass(frozen=True)
class GenerateRequest:
    """Prompts to continue side by side; options without a comment are those of ``AsyncLLM.steps``."""

    prompts: Sequence[list[int]]
    params: SamplingParams  # with a seed
    prefix: Sequence[bytes] = ()  # digests of the first prompt's blocks: select a replica with a warm prefix cache
    model: str = ""  # required ReplicaInfo.model
    identity: str | None = None  # required ReplicaInfo.identity if another replica has generated the pieces given
    given: Mapping[int, Sequence[Piece]] = field(default_factory=dict)  # by earlier replicas, by index of the sample
    drafter: Drafter | None = None
    priority: int = 0
    deadline: float | None = None
    salt: bytes = b""
    tenant: str = ""
    avoid: frozenset[str] = frozenset()  # names of replicas to use only if no other replica is available


@dataclass(frozen=True)
class RequestAccepted:
    """First message of a replica about a request."""

    replica: str  # name of the replica
    identity: str  # see ReplicaInfo
    # Whether the bits of a text are independent of the other requests in the batch. Otherwise no other replica can
    # continue the text.
    exact: bool = True
    node: str = ""  # Ray's id of the node
    process: int = 0  # process id on that node


@dataclass(frozen=True)
class StepReply:
    """Result of one step: the new pieces of all samples, and the load of the replica."""

    pieces: list[Piece]
    load: EngineLoad


@dataclass(frozen=True)
class RequestFailed:
    """Error of the request itself, which it would cause on every replica."""

    error: Exception


ReplicaMessage = RequestAccepted | StepReply | RequestFailed
