"""Gemma 4's assistant drafts chains: a small model that reads its target's keys and values.

Google publishes one for each Gemma 4, of 78 M parameters for E2B.
:mod:`pronk.drafting.from_target.modules.gemma4_assistant` has the formulas. As the assistant has no
keys of its own, it reads no text before it drafts.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from pronk.base.checks import check_choice, check_integer, check_path
from pronk.base.errors import ConfigError, OptionError
from pronk.base.keywords import known_keywords
from pronk.checkpoint.config import ModelConfig
from pronk.checkpoint.tensors import read_json
from pronk.drafting.from_target._assistant_runner import AssistantRunner
from pronk.drafting.from_target.modules.gemma4_assistant import (
    MODEL_TYPE,
    AssistantConfig,
    load_assistant,
    read_assistant_config,
)
from pronk.drafting.proposer import Capabilities, DraftContext, Drafter, Proposer, check_needs
from pronk.drafting.shared.chain import Chain, Stop
from pronk.drafting.shared.stepwise import begin_chains, model_chain_costs
from pronk.drafting.step_costs import ChainCosts, StepCosts
from pronk.drafting.target import Target
from pronk.models.options import WEIGHTS
from pronk.models.resolve import resolve_model
from pronk.sampling.tree import TokenTree

_SUFFIX = "-assistant"  # of the name of an assistant's folder, after that of its target


@known_keywords
@dataclass(frozen=True)
class Gemma4Assistant(Drafter):
    """Options of Gemma 4's assistant.

    Attributes:
        model: folder or Hub id of the assistant. ``None`` is the folder beside the target's folder
            with the same name and ``-assistant`` after it.
        num_tokens: maximum number of draft tokens of a chain, 1..64.
        weights: how the weights are stored: ``"plain"``, ``"int8"`` or ``"int4"``, as for
            :class:`~pronk.llm.LLM`.
    """

    name = "gemma4_assistant"

    model: str | None = None
    num_tokens: int = 5
    weights: str = "plain"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_path(f"{self.name}: model", self.model)
        check_integer(f"{self.name}: num_tokens", self.num_tokens, 1, 64)
        check_choice(f"{self.name}: weights", self.weights, WEIGHTS)

    def as_chains(self) -> Self:
        return self

    def find_default(
        self,
        folder: Path | None,
        config: ModelConfig,  # noqa: ARG002 - of the base class
    ) -> Path | None:
        """Return the folder of an assistant beside the target's folder; ``None``: there is none."""
        if folder is None:
            return None
        assistant = folder.with_name(folder.name + _SUFFIX)
        with suppress(ConfigError, OSError):
            if read_json(assistant / "config.json", ConfigError).get("model_type") == MODEL_TYPE:
                return assistant
        return None

    def bind(self, target: Target) -> Gemma4AssistantProposer:
        folder = (
            self.find_default(target.folder, target.decoder.config)
            if self.model is None
            else resolve_model(self.model).absolute()
        )
        if folder is None:
            msg = (
                f'{self.name}: expected model="…", a folder or a Hub id of an assistant of this '
                "target, found none"
            )
            raise OptionError(msg)
        config = read_assistant_config(folder, target.decoder.config)
        check_needs(self.name, _needs(config), target)

        def load_runner() -> AssistantRunner:
            assistant = load_assistant(folder, config, target.decoder.kernels, self.weights)
            return AssistantRunner(target, assistant)

        models = target.loaded_models
        runner = models.get_or_load(folder, self.name, self.weights, load=load_runner)
        return Gemma4AssistantProposer(self, runner)


def _needs(config: AssistantConfig) -> Capabilities:
    return Capabilities(
        computes_features=True, kv_layers=config.kv_layers, observes_all_steps=False
    )


class Gemma4AssistantProposer(Proposer[tuple[()]]):
    """Proposes chains; ``runner`` runs the assistant. Requests have no state."""

    def __init__(self, options: Gemma4Assistant, runner: AssistantRunner) -> None:
        self.options = options
        self.runner = runner
        self.capabilities = _needs(runner.assistant.assistant)
        self.name = options.name
        self.target = runner.target
        self.models = (runner,)
        self.model_name = options.model

    def chains(
        self, contexts: Sequence[DraftContext[tuple[()]]], stops: Sequence[Stop] | None = None
    ) -> list[Chain]:
        chains = begin_chains(self, contexts, self.options.num_tokens, stops=stops)
        self.runner.draft_chains([chain for chain in chains if not chain.is_full])
        return chains

    def propose(self, contexts: Sequence[DraftContext[tuple[()]]]) -> list[TokenTree]:
        return [chain.tree() for chain in self.chains(contexts)]

    def chain_costs(self, context: DraftContext[tuple[()]], costs: StepCosts) -> ChainCosts:
        return model_chain_costs(self.runner, context, costs, self.options.num_tokens)
