"""Options of :class:`pronk.LLM`: those of the model, of its cache, of batches and of drafting."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, TypedDict

from pronk.base.options import Option, check_options, documented
from pronk.cache.options import CacheOptions
from pronk.models.options import ModelOptions
from pronk.sampling.tree_size import DEFAULT_MAX_TREE, MAX_TREE

if TYPE_CHECKING:
    from pronk.drafting.proposer import Drafter
    from pronk.engine.request_factory import RequestFactory

MAX_WAIT = 2.0  # default of ``max_wait``, in seconds


@documented
@dataclass(frozen=True, kw_only=True)
class BatchOptions:
    """Limits of a forward pass, and of the time that a tenant waits for one."""

    max_batch: Annotated[
        int, Option("Maximum number of requests in one forward pass.", low=1, high=1024)
    ] = 16
    max_tree: Annotated[
        int,
        Option(
            "Maximum number of rows of a request in one forward pass: its last token and its draft "
            "tokens.",
            low=DEFAULT_MAX_TREE,
            high=MAX_TREE,
            details=(
                "More than the default pays only where rows cost little, as on GPUs, or with large "
                "windows of ``lookahead``. The text is the same."
            ),
        ),
    ] = DEFAULT_MAX_TREE
    max_wait: Annotated[
        float,
        Option(
            "Seconds after which a tenant that waits for others is in the next forward pass, "
            "whatever they sent.",
            low=0.0,
            high=1e9,
            details="Tenants are those of :class:`pronk.AsyncLLM`; a server has one for each key.",
        ),
    ] = MAX_WAIT
    prefill_chunk: Annotated[
        int | Literal["window"],
        Option(
            'Maximum number of prompt tokens per forward pass, 16..8192; "window": '
            "the sliding window."
        ),
    ] = 512


@documented
@dataclass(frozen=True, kw_only=True)
class DraftingOptions:
    """Options of speculation: the drafter, and which of its draft tokens are verified."""

    drafter: Annotated[
        "str | Drafter",
        Option(
            "Drafter that proposes draft tokens: a name, or a name with options as in "
            '"recycling(num_nodes=7)".',
            details='Or an object (:mod:`pronk.drafting`). ``"auto"`` stores no text for later '
            "requests.",
        ),
    ] = "auto"
    calibration: Annotated[
        bool | str | Path,
        Option(
            "Start from the acceptance statistics of earlier requests of this process, and from "
            "those of this file, if it exists.",
            details="No text is kept. ``llm.calibration.save()`` writes the file.",
        ),
    ] = True
    budget: Annotated[
        Literal["auto", "all"],
        Option(
            "auto: verify only draft tokens that pay for their rows on this machine. all: verify "
            "every draft token.",
            details='``"auto"`` maximizes expected tokens per second, and limits the time that '
            "speculation may lose.",
        ),
    ] = "auto"


@documented
@dataclass(frozen=True, kw_only=True)
class LLMOptions(DraftingOptions, BatchOptions, CacheOptions, ModelOptions):
    """Arguments of :class:`pronk.LLM`; raises ``OptionError`` if a value is out of its range."""

    progress: Annotated[
        Callable[[int, int], None] | None,
        Option("Receives the number of bytes loaded so far, and the total."),
    ] = None
    check: Annotated[
        "Callable[[RequestFactory], None] | None",
        Option(
            "Called once the tokenizer is loaded and before the weights are; may raise an error "
            "about a request."
        ),
    ] = None

    def __post_init__(self) -> None:
        check_options(self)


class ScheduleOptions(TypedDict, total=False):
    """Keywords of the calls of :class:`pronk.AsyncLLM` that are for the scheduler."""

    priority: int
    deadline: float | None
    salt: bytes
    tenant: str
