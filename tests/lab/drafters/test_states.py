"""The lab's drafters with recurrent targets and recurrent draft models."""

import pytest

from covering import covering
from engine.cases import PROMPTS, assert_same, drafter, plain, total
from engine.recurrent import FAIR, RECURRENT, draft_spec, engine, use_draft_models
from engine.test_equality import decode
from engine.test_states import check_draft_model
from lab.drafters.cases import REGISTERED, spec
from lab.drafters.trained_kangaroo import adapter_folder
from pronk.base.arrays import FLOAT32
from pronk.cache.states import StateCounts
from pronk.lab.drafters.modules.kangaroo import ADAPTERS
from tiny_models import tiny_decoder

SHORT = PROMPTS[:4]
# Drafters whose modules are made for the tiny target with attention are tested below.
NAMES = [name for name in REGISTERED if name not in ("kangaroo", "glide", "vanilla")]


@pytest.fixture(autouse=True)
def _draft_models(monkeypatch: pytest.MonkeyPatch) -> None:
    use_draft_models(monkeypatch)


@pytest.mark.few(3)
@pytest.mark.parametrize("name", NAMES)
def test_drafters(name: str) -> None:
    want = plain(FLOAT32, "repetitive", SHORT, **RECURRENT)
    made = engine(prefill_chunk=50, max_batch=3, share_prefixes=True)
    got = decode(made, [drafter(spec(name), want)], "repetitive", SHORT)
    assert_same(got, want)
    assert total(got, "drafted") > 0


@pytest.mark.few(1)
@pytest.mark.parametrize(("adapter", "exit_layer"), covering(ADAPTERS, [1, 2], strength=1))
def test_early_exit(adapter: str, exit_layer: int) -> None:
    """The first layers compute draft tokens, and leave the states as they are."""
    decoder = tiny_decoder(FLOAT32, **RECURRENT)
    folder = adapter_folder(decoder, exit_layer, adapter, noise=0.1)
    for options, counts in (("repetitive", None), ("all", StateCounts(3, 1, 24))):
        want = plain(FLOAT32, options, SHORT, **RECURRENT)
        made = engine(max_batch=3, share_prefixes=True, state_counts=counts)
        kangaroo = f"kangaroo(model={folder!r}, num_tokens=4, eta=0.2)"
        for _ in range(2):
            got = decode(made, [drafter(kangaroo, want)], options, SHORT)
            assert_same(got, want)
            assert not total(got, "preemptions")
        assert total(got, "drafted") > 0
        assert total(got, "accepted") > 0 or options == "all"


TREES = (
    f"cape({draft_spec(FAIR)}, sizes=3)",
    f"staged({draft_spec(FAIR)}, prompt_lookup(min_ngram=1), num_nodes=6)",
    f"beam({draft_spec(FAIR)}, width=3, num_tokens=3)",
    f"cape(threshold({draft_spec(FAIR)}))",
)


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("name", "target"), covering(TREES, ["recurrent", "attention"], strength=1)
)
def test_trees_of_recurrent_draft_models(name: str, target: str) -> None:
    check_draft_model(name, target, "temperature", shares=True)
