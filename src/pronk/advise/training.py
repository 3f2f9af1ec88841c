"""What a drafter would bring that could be trained for the model, and what training it would take: estimated.

How often its guesses are right is taken from ``pronk-tiny``'s drafter of the kind, trained for half an hour on a model
of ten million parameters (``measured.json``): of its ``w``-th guesses in a row, the share that was accepted. Each of
these conditional shares may be a tenth higher or lower, which is what suites of prompts differ by. Its cost
is computed from the bytes that a guess reads, at the measured bandwidth of the target's passes; the cost of rows is
measured. A training step is a forward pass of the target and three of the drafter, at the measured speed of torch's
products.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.resources import files
from itertools import accumulate, pairwise
from operator import mul
from typing import Any

from pronk.advise.facts import Passes, Span, Trainable
from pronk.architecture.config import ModelConfig
from pronk.speculation.cost_model import CostCurve, most_paying

__all__ = ["KINDS", "Kind", "estimate"]

# Above it what a drafter shows at 0.8 is taken, and below what it shows when the likeliest token is.
_WARM = 0.4

# Uncertainty of the measured conditional acceptance, for another model and other texts.
_WITHIN = 0.1

# Guesses in a row that a small model is asked for at most.
_DEEPEST = 8

# Tokens that the target writes to be learned from, by so many at a time, as `pronk train` has it by default.
_WRITTEN, _TOGETHER = 1_000_000, 32

_BYTES = 2  # of a number of a drafter, and of the activations' dtype


@dataclass(frozen=True)
class Kind:
    """A drafter as ``pronk train`` makes it by default.

    Attributes:
        tokens: training tokens of ``pronk-tiny``'s drafter of the kind.
        numbers: its weights for a target.
        read: numbers that one guess reads, and numbers that the guesses of a step read once.
        learned: numbers that each token's learning goes through, besides a pass of the target.
    """

    tokens: int
    numbers: Callable[[ModelConfig], float]
    read: Callable[[ModelConfig], tuple[float, float]]
    learned: Callable[[ModelConfig], float]


def _head(config: ModelConfig) -> float:
    return config.vocab_size * config.hidden_size


def _layer(config: ModelConfig, mlp: int) -> float:
    """Numbers of a layer with the target's attention and an MLP of so many numbers for each of the hidden ones."""
    attention = config.head_dim * (2 * config.num_heads + 2 * config.num_kv_heads)
    return config.hidden_size * (attention + mlp)


def _own_layer(config: ModelConfig) -> float:
    """Of one of the target's."""
    return _layer(config, (3 if config.gated else 2) * config.intermediate_size)


def _exit(config: ModelConfig) -> int:
    return max(1, config.num_layers // 8)


def _heads_layer(config: ModelConfig) -> float:
    """Of a head that is a layer with an MLP of 1.2 times the hidden size."""
    return _layer(config, 3 * 6 * config.hidden_size // 5)


def _small(tokens: int, hidden: int, body: float) -> Kind:
    """A small model with a vocabulary of the target's, whose embedding is its head."""

    def numbers(config: ModelConfig) -> float:
        return body + hidden * config.vocab_size

    return Kind(tokens, numbers, lambda config: (numbers(config), 0.0), numbers)


# By the word behind `pronk train`.
KINDS = {
    "draft": _small(19_560_000, 160, 0.55e6),
    "glide": _small(4_920_000, 192, 0.51e6),
    "kangaroo": Kind(
        6_550_000,
        lambda config: 4 * config.hidden_size**2,
        lambda config: (_exit(config) * _own_layer(config) + 4 * config.hidden_size**2 + _head(config), 0.0),
        lambda config: 4 * config.hidden_size**2 + _head(config),
    ),
    "medusa": Kind(
        2_110_000,
        lambda config: 4 * 2 * config.hidden_size**2,
        lambda config: (0.0, 4 * 2 * config.hidden_size**2 + _head(config)),
        lambda config: 4 * (2 * config.hidden_size**2 + _head(config)),
    ),
    "heads": Kind(
        2_840_000,
        lambda config: 3 * _heads_layer(config),
        lambda config: (0.0, 3 * _heads_layer(config) + _head(config)),
        lambda config: 3 * (_heads_layer(config) + _head(config)),
    ),
}


def estimate(
    kinds: Sequence[str], config: ModelConfig, passes: Passes, *, numbers: int, small: float, temperature: float
) -> list[Trainable]:
    """Drafters of some kinds for a target, the most promising first.

    Args:
        kinds: words behind ``pronk train``.
        config: of the target.
        passes: what they cost.
        numbers: that a pass of the target reads.
        small: seconds that a pass of a model takes of which next to nothing is to be read.
        temperature: of the texts.
    """
    found = [_estimate(kind, config, passes, numbers, small, temperature) for kind in kinds]
    return sorted(found, key=lambda each: -each.times.middle)


def _estimate(
    name: str, config: ModelConfig, passes: Passes, numbers: int, small: float, temperature: float
) -> Trainable:
    kind = KINDS[name]
    shares, independent = _shown(name, temperature)
    each, once = kind.read(config)
    guess, step = (small + read * passes.plain / numbers if read else 0.0 for read in (each, once))
    costs = CostCurve(tuple(passes.seconds), tuple(accumulate(passes.seconds.values(), max)))
    speed = partial(_speed, shares, costs, guess, step, independent=independent)
    middle, draft_tokens = speed(0.0)
    below = next((w / 100 for w in range(-40, 100) if speed(-w / 100)[0] < 1.0), 1.0) - 0.01
    return Trainable(
        kind=name,
        times=Span(middle, speed(-_WITHIN)[0], speed(_WITHIN)[0]),
        draft_tokens=draft_tokens,
        tokens=kind.tokens,
        seconds=_seconds(kind, config, passes, costs, numbers),
        nbytes=round(_BYTES * kind.numbers(config)),
        below=below,
    )


def _speed(
    shares: Sequence[Sequence[float]],
    costs: CostCurve,
    guess: float,
    step: float,
    shift: float,
    *,
    independent: bool,
) -> tuple[float, int]:
    """Over plain decoding's, and guesses of a step, if all shares are higher by ``shift``."""
    moved = [[min(0.99, max(0.0, share + shift * (rank == 0))) for rank, share in enumerate(row)] for row in shares]
    gains = _tree(moved) if independent else list(accumulate((row[0] for row in moved), mul))
    plain = costs.at(1)

    def seconds(draft_tokens: int) -> float:
        return costs.at(1 + draft_tokens) + (step + guess * draft_tokens if draft_tokens else 0.0)

    count, expected = most_paying(gains, 1.0, seconds)
    if not count:  # it would be asked nevertheless, to be compared
        count, expected = 1, 1.0 + gains[0]
    return expected * plain / seconds(count), count


def _tree(shares: Sequence[Sequence[float]], most: int = 31) -> list[float]:
    """Gains of the best nodes of a tree whose levels are right each on its own: *Medusa*, section 2.3.3."""
    level, nodes = [1.0], list[float]()
    for row in shares:
        level = sorted((gain * share for gain in level for share in row), reverse=True)[:most]
        nodes += level
    return sorted(nodes, reverse=True)[:most]


def _shown(kind: str, temperature: float) -> tuple[list[list[float]], bool]:
    """Return the measured acceptance of a kind of drafter.

    Returns:
        For each depth, the acceptance of the guesses by rank, given that the guess before was accepted; and whether
        the depths are independent of each other, as Medusa's heads are.
    """
    found: dict[str, Any] = json.loads((files("pronk.advise") / "measured.json").read_text(encoding="utf-8"))[kind]
    name = "greedy" if temperature < _WARM else "T=0.8"
    if "accuracies" in found:
        return found["accuracies"], True
    figures = found["figures"]
    reached = [1.0, *(value for key, value in figures.items() if key.startswith(f"{name} CTAR"))]
    if len(reached) == 1:
        return [[figures[f"{name} alpha"]], *[[_later(figures, name)]] * (_DEEPEST - 1)], False
    shares = [[after / before] for before, after in pairwise(reached)]
    return shares + ([shares[-1]] * (_DEEPEST - len(shares)) if found["chain"] else []), False


def _later(figures: dict[str, float], name: str) -> float:
    """The share of the second guesses and those behind them, by the tokens of a step with four guesses."""
    first, tokens = figures[f"{name} alpha"], figures[f"{name} S"]
    low, high = 0.0, 1.0
    for _ in range(40):
        share = (low + high) / 2
        low, high = (low, share) if 1 + first * (1 + share + share**2 + share**3) > tokens else (share, high)
    return low


def _seconds(kind: Kind, config: ModelConfig, passes: Passes, costs: CostCurve, numbers: int) -> float:
    """Of the target's writing and of learning."""
    writing = _WRITTEN * costs.at(_TOGETHER) / _TOGETHER
    return writing + kind.tokens * (2 * numbers / passes.teach + 6 * kind.learned(config) / passes.learn)
