"""A second, smaller model proposes chains (Leviathan et al. 2023, Chen et al. 2023).

The draft model generates up to ``num_tokens`` draft tokens, one forward pass each, which all requests share. Tokens
that entered the text since the last proposal are run in one pass (:mod:`pronk.drafting.shared.draft`).
"""

from __future__ import annotations

import warnings
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from pronk.base.arrays import Array
from pronk.base.checks import check_choice, check_number
from pronk.base.errors import OptionError
from pronk.base.keywords import known_keywords
from pronk.checkpoint.hub.clone_models import clone_model
from pronk.drafting.proposer import DraftContext
from pronk.drafting.shared.chain import Chain, Stop, extend_chains
from pronk.drafting.shared.draft import DraftLane, DraftRunner
from pronk.drafting.shared.side_cache import open_pool
from pronk.drafting.shared.stepwise import MAX_COUNTED, MIN_COUNTED, StepwiseDrafter, StepwiseProposer
from pronk.drafting.shared.vocabulary.translation import Translation
from pronk.drafting.target import Target
from pronk.models.choice import open_torch
from pronk.models.decoder import forward_weights
from pronk.models.loader import load_decoder, parse_dtype, read_config
from pronk.models.model_runner import ModelRunner
from pronk.models.options import WEIGHTS
from pronk.models.resolve import resolve_model
from pronk.sampling.tree import TokenTree
from pronk.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class ModelDrafter(StepwiseDrafter):
    """Options shared by the drafters that run a small decoder with a KV cache of its own.

    Attributes:
        model: folder or Hub id of the draft model. ``None`` selects a model in the folder ``models`` of a clone of this
            repository. For ``draft_model`` this is ``pronk-tiny-draft``; it needs a target with the same vocabulary.
        num_tokens: most draft tokens of a chain, 1..64. By default the target verifies 8 rows: the root and 7 tokens.
        min_confidence: a chain ends after its first token with a lower confidence, 0..1; 0 turns the rule off. The
            confidence is the draft model's largest probability. Under the coupled rule it includes the noise of the
            request's seed (:mod:`pronk.drafting.from_draft.threshold`).
    """

    min_confidence: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number(f"{self.name}: min_confidence", self.min_confidence, 0, 1)

    @abstractmethod
    def open(self, target: Target) -> DraftRunner:
        """Load the model, once for all drafters of the target with the same model and weights.

        Raises ``CheckpointError`` if the model cannot be loaded, ``OptionError`` if the vocabularies cannot be
        translated, or there is no default for this target.
        """

    def bind(self, target: Target) -> ModelProposer:
        return ModelProposer(self, self.open(target))


class ModelProposer(StepwiseProposer[DraftLane]):
    """Proposes chains of draft tokens; ``draft`` holds the draft model with its KV cache, and runs it."""

    options: ModelDrafter

    def __init__(self, options: ModelDrafter, draft: DraftRunner) -> None:
        super().__init__(options, draft, draft.runner.cache)
        self.draft = draft

    def start(self, prompt: Sequence[int]) -> DraftLane:  # noqa: ARG002 - the first proposal reads it
        return self.draft.make_lane()

    def ends(self, chain: Chain) -> bool:
        return chain.draft_tokens[-1].confidence < self.options.min_confidence

    def is_complete(self, stop: Stop | None, number: int, chain: Chain) -> bool:
        return not self.draft.num_free_positions(chain.context.state) or super().is_complete(stop, number, chain)

    def draft_chains(self, chains: Mapping[int, Chain], is_complete: Stop) -> None:
        def next_logits(numbers: Sequence[int]) -> Sequence[Array | None]:
            own = [chains[number] for number in numbers]
            if not own[0].draft_tokens:  # first round: all chains are empty
                return self.draft.forward_texts([chain.context for chain in own])
            tokens = [self.draft.to_draft_ids(chain.tokens[-1:]) for chain in own]
            return self.draft.forward_tokens([chain.context.state for chain in own], tokens)

        if len(chains) == 1:
            ((number, chain),) = chains.items()
            if self.draft.supports_draft_chain(chain.context):
                self.draft.draft_chain(chain, partial(is_complete, number))
                return
        extend_chains(chains, next_logits, is_complete)

    def shadow(self, context: DraftContext[DraftLane]) -> bool:
        lane = context.state
        num_unread = context.root - lane.start - len(lane.tokens) - len(lane.tree or ())
        if lane.reencoder is not None or not self.can_count(context, num_unread):
            return False
        (unread,) = self.draft.align_lanes([context])
        if unread is None:
            return False
        if len(unread) > MAX_COUNTED + 1:
            self.draft.forward_tokens([lane], [unread[: -MAX_COUNTED - 1]])
            unread = unread[-MAX_COUNTED - 1 :]
        skipped = MIN_COUNTED if lane.start and not lane.tokens else 0
        first = lane.start + len(lane.tokens) + 1  # index in the text of the token after the first unread one
        (logits,) = self.draft.forward_trees([lane], [TokenTree.chain(unread[:-1])], [[]])
        self.count_choices(context, logits[skipped:], first + skipped)
        return True

    def num_unread(self, context: DraftContext[DraftLane]) -> int:
        unread = max(0, len(context.tokens) - 1 - context.state.num_committed)
        return min(unread, self.draft.max_unread or unread)


@known_keywords
@dataclass(frozen=True)
class DraftModel(ModelDrafter):
    """Options of the drafter ``draft_model``, in addition to those of :class:`ModelDrafter`.

    Attributes:
        dtype: dtype of the weights; ``"auto"`` is the checkpoint's.
        weights: how the weights are stored: ``"plain"``, ``"int8"`` or ``"int4"``, as for :class:`~pronk.llm.LLM`.
    """

    name = "draft_model"

    dtype: str = "auto"
    weights: str = "plain"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice(f"{self.name}: dtype", self.dtype, ("auto", "float32", "bfloat16", "float16"))
        check_choice(f"{self.name}: weights", self.weights, WEIGHTS)

    def open(self, target: Target) -> DraftRunner:
        name = self.name
        path = _default_model(name, target) if self.model is None else resolve_model(self.model).absolute()

        def load_runner() -> DraftRunner:
            config = read_config(path)
            sizes = target.decoder.config.vocab_size, config.vocab_size
            translation = Translation(*sizes)
            if target.tokenizer is not None:
                tokenizer = Tokenizer.load(path, config.vocab_size)
                translation = Translation.between(name, target.tokenizer, sizes[0], tokenizer, sizes[1])
            dtype = parse_dtype(self.dtype, config)
            backend = target.decoder.backend.for_model(config, dtype)
            if backend is None:
                reason = f"{name}: no kernels for heads of {config.head_dim} in {path.name}"
                backend = open_torch("cpu", dtype, reason)
                warnings.warn(f"{reason}; torch computes the draft instead, slower", stacklevel=2)
            decoder = load_decoder(path, config, dtype=dtype, backend=backend, weights=self.weights)
            pool = open_pool(target, config, backend.compute_dtype(dtype), backend)
            relative_size = forward_weights(decoder).nbytes / forward_weights(target.decoder).nbytes
            return DraftRunner(ModelRunner(decoder, pool, clock=target.clock), translation, target, relative_size)

        return target.load_shared(path, self.dtype, self.weights, load=load_runner)


def _default_model(drafter: str, target: Target) -> Path:
    """Return the folder of pronk-tiny-draft; raise OptionError if it is absent or of another vocabulary."""
    path = clone_model("pronk-tiny-draft")
    tokenizer = target.tokenizer
    if path is None or tokenizer is None or Tokenizer.load(path).fingerprint != tokenizer.fingerprint:
        found = "none" if path is None else f"none, and {path.name} has another vocabulary"
        msg = f'{drafter}: expected model="…", a folder or a Hub id of a draft model for this target, found {found}'
        raise OptionError(msg)
    return path
