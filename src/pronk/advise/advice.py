"""Measuring for a few minutes: drafters on the user's texts, passes, threads, weights of fewer bits, memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter

import torch

from pronk.advise.facts import Facts, Memory, Passes, Rounded, Trainable
from pronk.advise.probes import free_memory, measure_passes, plain_step, round_weights
from pronk.advise.race import AUTO, Race
from pronk.advise.training import KINDS, estimate
from pronk.bench.machine import hardware
from pronk.bench.prompts import Prompt, encode, fit
from pronk.bench.records import PLAIN
from pronk.checks import check_number
from pronk.errors import PromptError
from pronk.kv_cache.layout import kv_bytes_per_token
from pronk.llm import LLM
from pronk.models.weights import count_parameters, pass_weights
from pronk.sampling.params import SamplingParams
from pronk.testing import tiny_checkpoint

__all__ = ["Adviser", "Plan"]

# Drafters for every model; and drafters that a clone has for pronk-tiny, with their kind in `pronk train`.
_FOR_ALL = ("suffix(store_tokens=0)", "prompt_lookup", "recycling", "lookahead")
_TRAINED = {
    "draft_model": "draft",
    "cape(draft_model)": "draft",
    "kangaroo": "kangaroo",
    "glide": "glide",
    "medusa": "medusa",
    "multi_token": "heads",
}

# Shares of the time: the race's, and until when weights of fewer bits are begun with.
_RACING, _ROUNDING = 0.5, 0.95

# Tokens of a prompt at most: what stands in the middle of longer ones is left out.
_LONGEST = 1024


@dataclass(frozen=True)
class Plan:
    """What to measure.

    Attributes:
        prompts: of the texts, taken in turns, and the first turns of conversations.
        drafters: to be tried beside those at hand.
        temperature: of the texts.
        max_tokens: of a text at most.
        minutes: for all of it, about.
        seed: of the texts.

    Raises:
        OptionError: no minutes.
    """

    prompts: tuple[Prompt, ...]
    drafters: tuple[str, ...] = ()
    temperature: float = 0.0
    max_tokens: int = 128
    minutes: float = 4.0
    seed: int = 7

    def __post_init__(self) -> None:
        check_number("minutes", self.minutes, 0, above=True)


class Adviser:
    """Measures a model for a while; what has been measured is there even if that ends early."""

    def __init__(self, llm: LLM, model: str | None, plan: Plan, tell: Callable[[str, int, int], None]) -> None:
        """Nothing is measured yet.

        Args:
            llm: the target, with a prefix cache, so that each prompt is read once.
            model: as the user named it; ``None`` is the clone's ``pronk-tiny``.
            plan: what to measure.
            tell: hears what is being done, seconds that are over, and all.

        Raises:
            PromptError: none of the prompts fits the model.
            PronkError: a drafter of the plan cannot be loaded, or does not go with the model.
        """
        self._llm, self._model, self._plan, self._tell = llm, model, plan, tell
        self._began, self._seconds = perf_counter(), 60 * plan.minutes
        self._prompts = list(self._ids())
        if not self._prompts:
            msg = f"prompts: expected one that leaves room for a text in {llm.config.context} tokens, found none"
            raise PromptError(msg)
        for name in plan.drafters:
            llm.get_proposer(name)
        params = SamplingParams(max_tokens=plan.max_tokens, temperature=plan.temperature, seed=plan.seed)
        self._race = Race(llm, list(dict.fromkeys((PLAIN, AUTO, *plan.drafters, *_FOR_ALL, *_TRAINED))), params)
        self._passes: Passes | None = None
        self._trainable: list[Trainable] = []
        self._rounded: dict[str, Rounded | str] = {}

    @property
    def measured(self) -> bool:
        """Whether there is anything to be said."""
        return bool(self._race.results())

    def measure(self) -> None:
        """All of it, for about as long as the plan says."""
        self._race.run(self._prompts, _RACING * self._seconds, self._say)
        self._say("passes and threads")
        self._passes = measure_passes(self._llm, self._prompts[0])
        self._trainable = self._trainables(self._passes)
        for weights in ("int8", "int4"):
            self._say(f"{weights} weights")
            late = self._share > _ROUNDING
            self._rounded[weights] = (
                "there was no time left" if late else round_weights(self._llm, self._model, weights, self._race.texts)
            )

    def facts(self, *, interrupted: bool) -> Facts:
        """What is known now; ``interrupted`` if that is not all."""
        config, cache = self._llm.config, self._llm.engine.cache
        weights = pass_weights(self._llm.engine.runner.decoder)
        return Facts(
            model=self._model,
            parameters=count_parameters(config),
            dtype=weights.kinds,
            hardware=hardware(self._llm.device),
            kernels=self._llm.kernels,
            temperature=self._plan.temperature,
            raced=tuple(self._race.results()),
            trainable=tuple(self._trainable),
            passes=self._passes,
            rounded=tuple(each for each in self._rounded.values() if isinstance(each, Rounded)),
            unrounded={name: each for name, each in self._rounded.items() if isinstance(each, str)},
            memory=Memory(
                weights.nbytes,
                kv_bytes_per_token(config, cache.kv_dtype),
                kv_bytes_per_token(config, torch.int8),
                config.context,
                free_memory(),
            ),
            looped=self._race.looped,
            texts=len({tuple(prompt) for prompt, _ in self._race.texts}),
            interrupted=interrupted,
        )

    def _ids(self) -> Iterator[list[int]]:
        room = self._llm.config.context - self._plan.max_tokens
        for prompt in self._plan.prompts:
            with suppress(PromptError):  # the tokenizer or the chat template refuses it
                ids = fit(encode(self._llm, prompt), min(room, _LONGEST))
                if ids and room > 0:
                    yield ids

    def _trainables(self, passes: Passes) -> list[Trainable]:
        """Of every kind of which none has been measured."""
        raced = {_TRAINED.get(each.drafter) for each in self._race.results()}
        return estimate(
            [kind for kind in KINDS if kind not in raced],
            self._llm.config,
            passes,
            numbers=pass_weights(self._llm.engine.runner.decoder).count,
            small=_overhead(self._llm),
            temperature=self._plan.temperature,
        )

    @property
    def _share(self) -> float:
        """Of the time that is over."""
        return (perf_counter() - self._began) / self._seconds

    def _say(self, what: str) -> None:
        self._tell(what, round(min(1.0, self._share) * self._seconds), round(self._seconds))


def _overhead(llm: LLM) -> float:
    """Measure the seconds of a forward pass that reads next to no weights."""
    with TemporaryDirectory() as folder:
        small = LLM(tiny_checkpoint(Path(folder)), drafter=PLAIN, device=str(llm.device), kv_memory="16MiB")
        return plain_step(small, [1])
