"""Acceptance counts that travel with a head: read, refused if damaged, and used by a cold engine."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from drafting.from_target import trained_eagle
from pronk import CheckpointError
from pronk.drafting import Auto, Eagle3, make_drafter
from pronk.drafting.acceptance_stats import AcceptanceStats, KindKey
from pronk.drafting.head_acceptance import (
    ACCEPTANCE_FILE,
    head_acceptance_document,
    read_head_acceptance,
)
from pronk.engine.request import Request
from pronk.sampling.params import SamplingParams
from tiny_models import make_engine, make_request, run, tiny_decoder

COUNTS = {KindKey(-1, 1, 0): (200.0, 50.0), KindKey(7, 2, 2): (8.0, 8.0)}


def write(folder: Path, document: Any) -> None:
    (folder / ACCEPTANCE_FILE).write_text(json.dumps(document))


def test_counts_are_read_as_they_were_written(tmp_path: Path) -> None:
    assert read_head_acceptance(tmp_path) == {}
    write(tmp_path, head_acceptance_document(COUNTS))
    assert read_head_acceptance(tmp_path) == COUNTS
    assert read_head_acceptance(tmp_path / "head.gguf") == {}


@pytest.mark.parametrize(
    "document",
    [
        [],
        {"format": "pronk-calibration/2", "counts": []},
        {"format": "pronk-head-acceptance/1"},
        {"format": "pronk-head-acceptance/1", "counts": [[1, 1, 0, 2.0]]},
        {"format": "pronk-head-acceptance/1", "counts": [[1, 1, 0, 2.0, 3.0]]},
        {"format": "pronk-head-acceptance/1", "counts": [[1, 1, 0, 4097.0, 1.0]]},
        {"format": "pronk-head-acceptance/1", "counts": [[1, True, 0, 2.0, 1.0]]},
        {"format": "pronk-head-acceptance/1", "counts": [[1, 1, 0, math.nan, 1.0]]},
    ],
)
def test_damaged_counts_are_refused(document: Any, tmp_path: Path) -> None:
    write(tmp_path, document)
    with pytest.raises(CheckpointError, match=r"found another; delete the file$"):
        read_head_acceptance(tmp_path)
    (tmp_path / ACCEPTANCE_FILE).write_text("{")
    with pytest.raises(CheckpointError, match=r"expected acceptance counts of a head, found .*"):
        read_head_acceptance(tmp_path)


def test_an_engine_begins_with_known_counts_once_and_keeps_its_own() -> None:
    stats = AcceptanceStats()
    stats.learn("eagle3", 7, 2, 1.0, accepted=False)
    for _ in range(2):
        stats.assume({"eagle3": COUNTS})
        # the count of the engine itself stays
        assert stats.counts == {
            ("eagle3", -1, 1, 0): [200.0, 50.0],
            ("eagle3", 7, 2, 2): [1.0, 0.0],
        }
    assert stats.take("other") == {}
    assert stats.take("eagle3") == COUNTS | {KindKey(7, 2, 2): (1.0, 0.0)}
    assert stats.counts == {}


def test_known_counts_stand_for_a_limited_number_of_draft_tokens() -> None:
    stats = AcceptanceStats()
    stats.assume({"eagle3": {KindKey(7, 1, 0): (4000.0, 1000.0)}})
    assert stats.counts["eagle3", 7, 1, 0] == [256.0, 64.0]
    assert stats.rate("eagle3", 7, 1, 0.0, 0.25) == pytest.approx(0.25)


@pytest.fixture
def head(tmp_path: Path) -> Eagle3:
    """Return the options of a trained head whose file says that it is accepted at a tenth."""
    trained = make_drafter(trained_eagle.spec())
    assert isinstance(trained, Eagle3)
    assert trained.model is not None
    for file in Path(trained.model).iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    write(tmp_path, head_acceptance_document({KindKey(-1, 1, 0): (200.0, 20.0)}))
    return replace(trained, model=str(tmp_path))


@pytest.mark.parametrize("composed", [False, True], ids=["alone", "in auto"])
def test_the_first_request_of_an_engine_plans_by_the_heads_counts(
    head: Eagle3, *, composed: bool
) -> None:
    stats = AcceptanceStats()
    engine = make_engine(tiny_decoder(), acceptance_stats=stats)
    proposer = (Auto((head,)) if composed else head).bind(engine.target)
    request: Request = make_request([1, 2, 3], SamplingParams(max_tokens=2), proposer)
    engine.add(request)
    engine.step()
    (label,) = proposer.known_acceptance
    assert label.startswith("eagle3")
    rates = request.speculation.ledger.acceptance.rates(label)
    # 0.7 without the file
    assert 0.1 < rates.mean(0.7) < 0.2
    while not request.ended:
        engine.step()
    assert request.stats.draft_error is None


def test_requests_that_share_no_counts_have_no_known_ones(head: Eagle3) -> None:
    engine = make_engine(tiny_decoder())
    request = make_request([1, 2, 3], SamplingParams(max_tokens=2), head.bind(engine.target))
    run(engine, [request])
    assert request.stats.draft_error is None
