"""Messages between the dispatcher and the replicas, and the identity of a replica."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from pronk import BITS, LLM, Drafter, OptionError, Piece, SamplingParams
from pronk.backends import installed_library
from pronk.checkpoint import Fingerprint, ModelConfig
from pronk.serving import EngineLoad
from pronk.text import AnswerCalls, Tokenizer


@dataclass(frozen=True)
class ReplicaInfo:
    """Description of a replica: what its tokens depend on, and its default drafter."""

    # JSON text of all that the generated tokens depend on: model, format of the weights, bits.
    # Replicas with equal identities generate the same text for the same seed.
    identity: str
    model: str  # JSON text: ``identity`` without its entry ``bits``
    kernels: str  # instruction set of the kernels, such as "avx2"
    drafter: str  # name of the default drafter

    @property
    def bits(self) -> str:
        """:attr:`LLM.bits <pronk.LLM.bits>` of the replica's model: ``portable`` or ``fast``."""
        is_portable = json.loads(self.identity)["bits"].startswith("portable")
        return "portable" if is_portable else "fast"


@dataclass(frozen=True)
class GenerateRequest:
    """Arguments of :meth:`pronk.async_llm.AsyncLLM.steps`, and fields that select a replica."""

    prompts: Sequence[list[int]]  # token ids of each prompt
    params: SamplingParams  # ``seed`` is set, so that every replica generates the same text
    # prefix_digests() of the first prompt, to find a replica with this prefix in its KV cache.
    prefix: Sequence[bytes] = ()
    model: str = ""  # ReplicaInfo.model that the replica must have; empty accepts every model
    # ReplicaInfo.identity that the replica must have; None accepts every identity.
    identity: str | None = None
    # By sample index, the pieces that the client already has from other replicas. The replica
    # continues after these pieces.
    given: Mapping[int, Sequence[Piece]] = field(default_factory=dict)
    drafter: Drafter | None = None
    priority: int = 0
    deadline: float | None = None
    salt: bytes = b""
    tenant: str = ""
    adapter: str | None = None  # name of the adapter
    # Names of replicas to use only if no other replica is available.
    avoid: frozenset[str] = frozenset()
    calls: AnswerCalls | None = None
    branch_positions: Sequence[Sequence[int]] = ()


@dataclass(frozen=True)
class RequestAccepted:
    """First message of a replica about a request, with the replica's name and identity."""

    replica: str  # unique name of the replica in Ray Serve
    identity: str  # ReplicaInfo.identity of the replica
    # Whether a request's logits are independent of the other requests in the batch. Otherwise
    # another replica cannot continue a text with the same tokens.
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
    """Message of an error that the request itself causes, so that no other replica is tried."""

    error: Exception


ReplicaMessage = RequestAccepted | StepReply | RequestFailed


def identity(llm: LLM, options: Mapping[str, Any]) -> tuple[str, str]:
    """Return the fields ``identity`` and ``model`` of :class:`ReplicaInfo`.

    ``options`` are the arguments of :class:`pronk.LLM` with which ``llm`` was created.
    """
    parts = options.get("workers", 1) if options.get("parallel") == "tensor" else 1
    adapters = {name: adapter.digest.hex() for name, adapter in llm.adapters.items()}
    model = {
        **_model_entries(llm.path, llm.config, llm.tokenizer),
        "dtype": str(llm.dtype),
        "kv_dtype": options.get("kv_dtype", "auto"),
        "weights": options.get("weights", "plain"),
        "parts": parts,
        "adapters": adapters,
        "guides": _version("llguidance"),
    }
    return json.dumps({**model, "bits": _bits(llm)}), json.dumps(model)


def _bits(llm: LLM) -> str:
    """Return what the bits of logits depend on besides the model.

    Portable bits of a CPU depend on ``pronk.BITS`` alone: replicas on other processors, with
    libraries of other compilers, continue each other's texts.
    """
    if llm.device != "cpu":
        return f"device {llm.device}"
    if llm.bits == "portable":
        return f"portable {BITS}"
    return f"fast {llm.kernels} {_library_digest()}"


def _library_digest() -> str:
    """Return the first 12 hex digits of the SHA-256 of the kernels' library, or ``none``."""
    library = installed_library()
    if not library.is_file():
        return "none"
    return hashlib.sha256(library.read_bytes()).hexdigest()[:12]


def check_model(path: Path, config: ModelConfig, tokenizer: Tokenizer, model: str) -> None:
    """Compare the model files of the server with those of a replica.

    Args:
        path: path of the server's model.
        config: config of the server's model.
        tokenizer: tokenizer of the server's model.
        model: ``ReplicaInfo.model`` of the replica.

    Raises:
        OptionError: the files differ.
    """
    entries = json.loads(model)
    for name, value in _model_entries(path, config, tokenizer).items():
        if entries.get(name) != value:
            msg = (
                f"replicas: expected the server's {name}, {value}; found {entries.get(name)}; use "
                "the same files"
            )
            raise OptionError(msg)


def _model_entries(path: Path, config: ModelConfig, tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the entries of an identity that need no weights: versions, and digests of files."""
    from pronk import __version__  # noqa: PLC0415 - the package imports its subpackages

    return {
        "version": __version__,
        "model": str(Fingerprint.of(path)),
        "config": config.digest,
        "tokenizer": f"{tokenizer.digest} by {_version('tokenizers')}",
    }


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"
