"""Messages between the dispatcher and the replicas."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from pronk.async_llm import EngineLoad
from pronk.outputs import Piece
from pronk.sampling.params import SamplingParams
from pronk.speculation.proposer import Drafter


@dataclass(frozen=True)
class ReplicaInfo:
    """Description of a replica."""

    # JSON text of everything that the generated tokens depend on: model, format of the weights, kernels. Replicas with
    # equal identities generate the same text for the same seed.
    identity: str
    model: str  # JSON text: ``identity`` without its entry ``kernels``
    kernels: str  # instruction set of the kernels, such as "avx2", or "torch"
    drafter: str  # name of the default drafter


@dataclass(frozen=True)
class GenerateRequest:
    """Arguments of :meth:`pronk.async_llm.AsyncLLM.steps`, and fields that select a replica."""

    prompts: Sequence[list[int]]
    params: SamplingParams  # ``seed`` is set, so that every replica generates the same text
    prefix: Sequence[bytes] = ()  # prefix_digests() of the first prompt, to find a replica whose KV cache has it
    model: str = ""  # ReplicaInfo.model that the replica must have; empty accepts every model
    identity: str | None = None  # ReplicaInfo.identity that the replica must have; None accepts every identity
    # Sample index to the pieces that the client already has from other replicas; this replica continues after them.
    given: Mapping[int, Sequence[Piece]] = field(default_factory=dict)
    drafter: Drafter | None = None
    priority: int = 0
    deadline: float | None = None
    salt: bytes = b""
    tenant: str = ""
    adapter: str | None = None  # name of the adapter
    avoid: frozenset[str] = frozenset()  # names of replicas to use only if no other replica is available


@dataclass(frozen=True)
class RequestAccepted:
    """First message of a replica about a request."""

    replica: str  # unique name of the replica in Ray Serve
    identity: str  # ReplicaInfo.identity of the replica
    # Whether a request's logits are independent of the other requests in the batch. If False, another replica cannot
    # continue a text with the same tokens.
    exact: bool = True
    node: str = ""  # Ray's id of the machine on which the replica runs
    process: int = 0  # process id of the replica on that machine


@dataclass(frozen=True)
class StepReply:
    """Result of one step: the new pieces of all samples, and the load of the replica."""

    pieces: list[Piece]
    load: EngineLoad


@dataclass(frozen=True)
class RequestFailed:
    """Error whose cause is the request, so that a retry on another replica would fail too."""

    error: Exception


ReplicaMessage = RequestAccepted | StepReply | RequestFailed
