"""A second, smaller model proposes chains (Leviathan et al. 2023, Chen et al. 2023).

The draft model generates up to ``num_tokens`` draft tokens, with one forward pass for each; the
requests share the passes. Tokens that entered the text since the last proposal are run in one pass
(:mod:`pronk.drafting.shared.draft_runner`).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Self

from pronk.base.checks import check_choice, check_integer, check_number, check_path
from pronk.base.errors import OptionError, locate_error
from pronk.base.keywords import known_keywords
from pronk.checkpoint.hub.clone_models import clone_model
from pronk.drafting.proposer import Capabilities, DraftContext, Drafter, Proposer
from pronk.drafting.shared.chain import Chain, Stop
from pronk.drafting.shared.draft_cache import DraftCache, open_pool
from pronk.drafting.shared.draft_runner import DraftRunner
from pronk.drafting.shared.stepwise import (
    MAX_COUNTED,
    MIN_COUNTED,
    begin_chains,
    can_count,
    count_choices,
    model_chain_costs,
)
from pronk.drafting.shared.vocabulary.translation import Translation
from pronk.drafting.step_costs import ChainCosts, StepCosts
from pronk.drafting.target import Target
from pronk.models.choice import compute_dtype
from pronk.models.decoder import forward_weights
from pronk.models.loader import parse_dtype, read_config
from pronk.models.options import WEIGHTS
from pronk.models.resolve import resolve_model
from pronk.sampling.draft_token import DraftLogits
from pronk.sampling.tree import TokenTree
from pronk.text.tokenizer import Tokenizer, have_equal_files


@dataclass(frozen=True)
class ModelDrafter(Drafter):
    """Options shared by the drafters that run a small decoder with a KV cache of its own.

    Attributes:
        model: folder or Hub id of the draft model. ``None`` selects a model in the folder
            ``models`` of a clone of this repository. For ``draft_model`` this is
            ``pronk-tiny-draft``; it needs a target with the same vocabulary.
        num_tokens: maximum number of draft tokens of a chain, 1..64. By default the target verifies
            8 rows: the root and 7 tokens.
        min_confidence: a chain ends after its first token with a lower confidence, 0..1; 0 turns
            the rule off. The confidence is the draft model's largest probability. Under the coupled
            rule, the noise of the request's seed is added to the logits before.
    """

    model: str | None = None
    num_tokens: int = 7
    min_confidence: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_path(f"{self.name}: model", self.model)
        check_integer(f"{self.name}: num_tokens", self.num_tokens, 1, 64)
        check_number(f"{self.name}: min_confidence", self.min_confidence, 0, 1)

    def as_chains(self) -> Self:
        return self

    @abstractmethod
    def open(self, target: Target) -> DraftRunner:
        """Load the model, once for all drafters of the target with the same model and weights.

        Raises ``CheckpointError`` if the model cannot be loaded, ``OptionError`` if the
        vocabularies cannot be translated, or there is no default for this target.
        """

    def bind(self, target: Target) -> ModelProposer:
        return ModelProposer(self, self.open(target))


class ModelProposer(Proposer[DraftCache]):
    """Proposes chains of tokens that a draft model generates.

    ``draft`` holds the draft model with its KV pool, and runs it.
    """

    def __init__(self, options: ModelDrafter, draft: DraftRunner) -> None:
        self.options = options
        self.draft = draft
        self.capabilities = Capabilities(kv_layers=draft.kv_layers, observes_all_steps=False)
        self.name = options.name
        self.target = draft.target
        self.models = (draft,)
        self.model_name = options.model

    def start(self, prompt: Sequence[int]) -> DraftCache:  # noqa: ARG002 - the first proposal reads it
        return self.draft.make_cache()

    def stop(self, state: DraftCache) -> None:
        state.release()

    on_preempt = stop  # for a preempted request, the next proposal fills new blocks

    def chains(
        self, contexts: Sequence[DraftContext[DraftCache]], stops: Sequence[Stop] | None = None
    ) -> list[Chain]:
        """Return a chain for each context.

        A chain is empty if drafting is not expected to save time, or is impossible in this step.
        """
        chains = begin_chains(self, contexts, self.options.num_tokens, self._is_unsure, stops)
        self.draft.draft_chains([chain for chain in chains if not chain.is_full])
        return chains

    def propose(self, contexts: Sequence[DraftContext[DraftCache]]) -> list[TokenTree]:
        return [chain.tree() for chain in self.chains(contexts)]

    def _is_unsure(self, chain: Chain) -> bool:
        return chain.draft_tokens[-1].confidence < self.options.min_confidence

    def score_history(self, context: DraftContext[DraftCache]) -> bool:
        cache = context.state
        if cache.reencoder is not None or not can_count(context, context.root - cache.num_read):
            return False
        (unread,) = self.draft.align([context])
        if unread is None:
            return False
        if len(unread) > MAX_COUNTED + 1:
            self.draft.forward_tokens([context], [unread[: -MAX_COUNTED - 1]])
            unread = unread[-MAX_COUNTED - 1 :]
        skipped = MIN_COUNTED if cache.start and not cache.tokens else 0
        # index in the text of the token after the first unread one
        first = cache.start + len(cache.tokens) + 1
        (logits,) = self.draft.forward_trees([context], [TokenTree.chain(unread[:-1])], [[]])
        rows = [DraftLogits(row) for row in logits[skipped:]]
        count_choices(self.label, context, rows, first + skipped)
        return True

    def chain_costs(self, context: DraftContext[DraftCache], costs: StepCosts) -> ChainCosts:
        unread = max(0, len(context.tokens) - 1 - context.state.num_committed)
        unread = min(unread, self.draft.max_unread or unread)
        return model_chain_costs(self.draft, context, costs, self.options.num_tokens, unread)


@known_keywords
@dataclass(frozen=True)
class DraftModel(ModelDrafter):
    """Options of the drafter ``draft_model``, in addition to those of :class:`ModelDrafter`.

    Attributes:
        dtype: dtype of the weights; ``"auto"`` is the checkpoint's.
        weights: how the weights are stored: ``"plain"``, ``"int8"`` or ``"int4"``, as for
            :class:`~pronk.llm.LLM`.
    """

    name = "draft_model"

    dtype: str = "auto"
    weights: str = "plain"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice(f"{self.name}: dtype", self.dtype, ("auto", "float32", "bfloat16", "float16"))
        check_choice(f"{self.name}: weights", self.weights, WEIGHTS)

    def open(self, target: Target) -> DraftRunner:
        model = _default_model(self.name, target) if self.model is None else self.model
        return load_draft_model(
            target, model, drafter=self.name, dtype=self.dtype, weights=self.weights
        )


def load_draft_model(
    target: Target, model: str | Path, *, drafter: str, dtype: str = "auto", weights: str = "plain"
) -> DraftRunner:
    """Return a draft model for a target, with its KV pool and the translation of token ids.

    All drafters of a target that load the same model with the same options share its weights and
    its KV pool, which is a part of the target's memory. The model is freed with the last proposer
    that uses it.

    Args:
        target: the target model.
        model: folder, GGUF file or name of the draft model, as for :class:`~pronk.llm.LLM`. Its
            vocabulary may differ from the target's (:class:`Translation`).
        drafter: name of the drafter, with which messages begin.
        dtype: dtype of the weights; ``"auto"`` is the checkpoint's.
        weights: how the weights are stored: ``"plain"``, ``"int8"`` or ``"int4"``.

    Raises:
        CheckpointError: the model cannot be found or loaded.
        ConfigError: pronk does not support the model.
        OptionError: the vocabularies have too few tokens in common, the memory is too small, or the
            target's device does not compute the draft model.
    """
    path = resolve_model(model).absolute()

    def load() -> DraftRunner:
        config = read_config(path)
        translation = _translate(drafter, target, path, config.vocab_size)
        parsed_dtype = parse_dtype(dtype, config)
        with locate_error(drafter, OptionError, OptionError):
            make_pool = target.runner.draft_pool(config)
        pool = open_pool(target, config, compute_dtype(parsed_dtype), make_pool)
        runner = target.runner.load_draft_model(path, pool, parsed_dtype, weights)
        draft_bytes = forward_weights(runner.decoder).nbytes
        relative_size = draft_bytes / forward_weights(target.decoder).nbytes
        return DraftRunner(runner, translation, target, relative_size)

    return target.loaded_models.get_or_load(path, dtype, weights, load=load)


def _translate(drafter: str, target: Target, path: Path, draft_size: int) -> Translation:
    """Return the translation of the target's token ids to those of the draft model at ``path``.

    ``draft_size`` is the draft model's number of logits.
    """
    target_size = target.decoder.config.vocab_size
    if target.tokenizer is None:
        return Translation(target_size, draft_size)
    if target_size <= draft_size and _has_tokenizer_of(target, path):
        return Translation(target_size, draft_size)
    tokenizer = Tokenizer.load(path, draft_size)
    return Translation.between(drafter, target.tokenizer, target_size, tokenizer, draft_size)


def _default_model(drafter: str, target: Target) -> Path:
    """Return the folder of ``pronk-tiny-draft``, the draft model in a clone of the repository.

    Raise ``OptionError`` if the folder is absent, or the target has another vocabulary.
    """
    path = clone_model("pronk-tiny-draft")
    if path is None or not _has_vocabulary_of(target, path):
        found = "none" if path is None else f"none, and {path.name} has another vocabulary"
        msg = (
            f'{drafter}: expected model="…", a folder or a Hub id of a draft model for this '
            f"target, found {found}"
        )
        raise OptionError(msg)
    return path


def _has_vocabulary_of(target: Target, folder: Path) -> bool:
    """Return whether a draft model has the target's vocabulary; False without a tokenizer."""
    if target.tokenizer is None:
        return False
    if _has_tokenizer_of(target, folder):
        return True
    size, fingerprint = _read_vocabulary(folder)
    # The fingerprint of a large vocabulary takes a tenth of a second.
    return size == target.tokenizer.vocab_size and fingerprint == target.tokenizer.fingerprint


@cache
def _read_vocabulary(folder: Path) -> tuple[int, str]:
    """Return the size and the fingerprint of a draft model's vocabulary.

    They are kept, because "auto" asks for them twice with each target, and a folder of a clone does
    not change.
    """
    tokenizer = Tokenizer.load(folder)
    return tokenizer.vocab_size, tokenizer.fingerprint


def _has_tokenizer_of(target: Target, folder: Path) -> bool:
    """Return whether a draft model has the files of the target's tokenizer, which is loaded."""
    return target.folder is not None and have_equal_files(target.folder, folder)
