"""What could be trained: estimated by the papers' equations and the measured acceptance of pronk-tiny's drafters."""

from __future__ import annotations

import json
from dataclasses import replace
from importlib.resources import files
from typing import Any

import pytest

from pronk.advise.facts import Passes
from pronk.advise.training import KINDS, estimate
from pronk.bench.metrics import expected_speedup
from pronk.cli.train.kinds import KINDS as COMMANDS
from pronk.models.clone_models import default_model
from pronk.models.loader import read_config
from pronk.train.options import ModelShape

CONFIG = read_config(default_model())
FILES = {kind: f"pronk-tiny-{kind}/drafter.json" for kind in ("glide", "kangaroo", "medusa")} | {
    "draft": "pronk-tiny-draft/draft.json",
    "heads": "pronk-tiny-multi-token/drafter.json",
}
FLAT = Passes(dict.fromkeys((1, 2, 4, 8, 16, 32), 1.0), 0.8, 1e9, 1e9, {1: 1.0}, 1)
DEAR = replace(FLAT, seconds={1: 1.0, 2: 2.0, 4: 4.0, 8: 8.0, 16: 16.0, 32: 32.0})


def card(kind: str) -> dict[str, Any]:
    """What training wrote beside pronk-tiny's drafter of a kind."""
    return json.loads((default_model().parent / FILES[kind]).read_text(encoding="utf-8"))  # type: ignore[no-any-return]


def by_kind(passes: Passes, temperature: float = 0.8, small: float = 0.0, numbers: int = 10**12) -> dict:  # type: ignore[type-arg]
    found = estimate(list(KINDS), CONFIG, passes, numbers=numbers, small=small, temperature=temperature)
    assert [each.times.middle for each in found] == sorted((each.times.middle for each in found), reverse=True)
    return {each.kind: each for each in found}


def test_every_command_that_trains_has_an_estimate() -> None:
    assert set(KINDS) == set(COMMANDS)


@pytest.mark.parametrize("kind", KINDS)
def test_measured_acceptance_is_that_of_the_card(kind: str) -> None:
    measured = json.loads((files("pronk.advise") / "measured.json").read_text(encoding="utf-8"))[kind]
    found = card(kind)
    assert measured.get("accuracies") == found.get("shape", {}).get("accuracies")
    assert measured.get("figures", {}).items() <= found["figures"].items()
    assert measured.get("chain", False) == bool({"exit_layer", "block"} & found.get("shape", {}).keys())


@pytest.mark.parametrize("kind", KINDS)
def test_numbers_are_those_of_the_drafter_of_pronk_tiny(kind: str) -> None:
    """Norms aside, which are next to nothing."""
    from safetensors import safe_open

    folder = (default_model().parent / FILES[kind]).parent
    with safe_open(folder / "model.safetensors", "pt") as weights:
        sizes = [weights.get_slice(name).get_shape() for name in weights.keys()]  # noqa: SIM118 - no dictionary
    matrices = sum(shape[0] * shape[1] for shape in sizes if len(shape) == 2)
    matrices += sum(shape[0] * shape[1] * shape[2] for shape in sizes if len(shape) == 3)
    assert KINDS[kind].numbers(CONFIG) == pytest.approx(matrices, rel=0.02)


def test_small_models_are_as_the_commands_make_them() -> None:
    """The estimate knows them as hidden size times vocabulary, and a body."""
    for kind, model in (("draft", COMMANDS["draft"]()), ("glide", COMMANDS["glide"]())):
        config = replace(CONFIG, vocab_size=10**6)
        grown = KINDS[kind].numbers(config) - KINDS[kind].numbers(CONFIG)
        assert grown == model.hidden * (10**6 - CONFIG.vocab_size)  # type: ignore[attr-defined]
    assert ModelShape.vocab == CONFIG.vocab_size


@pytest.mark.parametrize(("temperature", "name"), [(0.0, "greedy"), (0.8, "T=0.8")])
def test_where_all_is_free_a_step_has_the_tokens_of_the_card(temperature: float, name: str) -> None:
    """With the card's own number of guesses, or more where a chain may go on."""
    found = by_kind(FLAT, temperature)
    figures = card("heads")["figures"]
    assert found["heads"].times.middle == pytest.approx(figures[f"{name} S"], rel=0.05)
    for kind in ("draft", "kangaroo", "glide"):
        figures = card(kind)["figures"]
        assert figures[f"{name} S"] * 0.95 <= found[kind].times.middle <= 1.5 * figures[f"{name} S"]
    assert found["medusa"].draft_tokens == 31
    for each in found.values():
        assert each.times.low < each.times.middle < each.times.high
        assert each.below > 0


def test_a_chain_is_priced_by_the_field_s_equation() -> None:
    """One guess at a known share and a known cost: Leviathan's speed-up."""
    figures = card("draft")["figures"]
    cost = 0.25
    passes = replace(FLAT, seconds={1: 1.0, 2: 1.0, 3: 9.0, 32: 99.0})
    found = by_kind(passes, small=cost)["draft"]
    assert found.draft_tokens == 1
    assert found.times.middle == pytest.approx(expected_speedup(figures["T=0.8 alpha"], 1, cost), rel=1e-3)


def test_where_rows_are_as_dear_as_passes_nothing_pays() -> None:
    for each in by_kind(DEAR, small=0.1).values():
        assert each.times.high <= 1.0
        assert each.draft_tokens == 1
        assert each.below < 0


def test_learning_takes_as_long_as_the_machine_is_slow() -> None:
    slow, fast = by_kind(FLAT), by_kind(replace(FLAT, teach=1e10, learn=1e10))
    for kind, each in slow.items():
        writing = 1e6 / 32
        assert (each.seconds - writing) == pytest.approx(10 * (fast[kind].seconds - writing))
        assert each.seconds > writing > 0
