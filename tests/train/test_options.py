from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pronk.base.errors import OptionError
from pronk.train.corpus.sources import parse_source
from pronk.train.lm import two_phases
from pronk.train.options import DataOptions, LoopOptions, ModelShape, TrainOptions, fit_lengths
from train.tiny import OWN, SHAPE, TINY, TINY_DRAFT


@pytest.mark.parametrize(
    ("options", "change", "message"),
    [
        (TINY_DRAFT, {"share": 1.5}, "share: expected a number in 0..1, found 1.5"),
        (TINY_DRAFT, {"hard": -0.1}, "hard: expected a number in 0..1, found -0.1"),
        (TINY_DRAFT, {"num_tokens": 65}, "num-tokens: expected an integer in 0..64, found 65"),
        (TINY_DRAFT, {"length": 65}, "length: expected an integer in 1..64, found 65"),
        (OWN, {"tokens": -1}, "on-policy: expected an integer of at least 0, found -1"),
        (OWN, {"prompt": 7}, "prompt: expected an integer of at least 8, found 7"),
        (OWN, {"batch": 0}, "batch: expected an integer of at least 1, found 0"),
        (TINY, {"steps": 0}, "steps: expected an integer of at least 1, found 0"),
        (SHAPE, {"layers": 0}, "layers: expected an integer of at least 1, found 0"),
        (TINY, {"minutes": -1.0}, "minutes: expected a finite number above 0, found -1.0"),
        (TINY, {"length": 65}, "length: expected an integer in 1..64, found 65"),
        (TINY, {"length": 0}, "length: expected an integer in 1..64, found 0"),
        (TINY, {"micro": 0}, "micro: expected an integer of at least 1, found 0"),
        (TINY, {"final_length": 128}, "final-length: expected an integer in 1..64, found 128"),
        (TINY, {"final_share": 1.5}, "final-share: expected a number in 0..1, found 1.5"),
        (TINY, {"micro": 100}, "micro: expected a divisor of batch 256, found 100"),
        (TINY, {"micro": 32}, "micro: expected a multiple of final-length 64, found 32"),
        (TINY, {"optimizer": "sgd"}, "optimizer: expected one of muon, adamw, found 'sgd'"),
        (TINY, {"rate": 0.0}, "lr: expected a finite number above 0, found 0.0"),
        (TINY, {"rate": float("nan")}, "lr: expected a finite number above 0, found nan"),
        (TINY, {"patience": 0}, "patience: expected an integer of at least 1, found 0"),
        (TINY, {"threads": 0}, "threads: expected an integer of at least 1, found 0"),
        (TINY, {"seed": -1}, "seed: expected an integer of at least 0, found -1"),
    ],
)
def test_options_out_of_range_are_named(
    options: Any, change: dict[str, object], message: str
) -> None:
    with pytest.raises(OptionError) as error:
        replace(options, **change)
    assert str(error.value) == message


def test_shapes_and_mixtures_out_of_range_are_named() -> None:
    with pytest.raises(OptionError, match="found hidden 30, heads 4, kv-heads 2"):
        ModelShape(hidden=30, heads=4, kv_heads=2)
    with pytest.raises(OptionError, match="expected at least one source"):
        DataOptions(())


@pytest.mark.parametrize("name", ["valid", "exclude"])
def test_files_that_are_missing_are_named(tmp_path: Path, name: str) -> None:
    sources = (parse_source("python=1"),)
    with pytest.raises(OptionError) as caught:
        DataOptions(sources, **{name: (tmp_path / "none.jsonl",)})
    assert (
        str(caught.value)
        == f"{name}: expected a file at {tmp_path / 'none.jsonl'}, found none; check the path"
    )
    with pytest.raises(
        OptionError, match=f"{name}: expected a file at .*, found a folder; check the path"
    ):
        DataOptions(sources, **{name: (tmp_path,)})


def test_loop_without_a_shape_has_no_longest_sequence() -> None:
    assert LoopOptions(length=512, final_length=4096).final_length == 4096
    with pytest.raises(
        OptionError, match="final-length: expected an integer of at least 1, found 0"
    ):
        LoopOptions(final_length=0)


def test_options_that_may_change_define_nothing() -> None:
    assert TINY.defining().items() >= {"seed": 0, "rate": 1e-2, "clip": 1.0}.items()
    assert not TINY.defining().keys() & {"minutes", "patience", "threads", "evaluate_every"}
    assert "num_tokens" not in TINY_DRAFT.defining()
    assert "share" in TINY_DRAFT.defining()


def test_longest_sequence_is_one_that_is_read() -> None:
    assert (TINY.length, TINY.final_length) == (32, 64)
    assert [replace(TINY, final_share=share).longest for share in (0.0, 0.5, 1.0)] == [32, 64, 64]
    assert replace(TINY, length=64, final_length=32, final_share=1.0).longest == 32


@pytest.mark.parametrize(
    ("context", "given", "expected"),
    [  # micro, length, final length
        (2048, {}, (4096, 256, 2048)),
        (1024, {}, (4096, 256, 1024)),
        (1000, {}, (4096, 256, 512)),
        (64, {}, (4096, 64, 64)),
        (1000, {"batch": 3000}, (3000, 250, 1000)),
        (1000, {"batch": 9000}, (3000, 250, 1000)),
        (2048, {"batch": 512}, (512, 256, 512)),
        (1000, {"batch": 8000, "length": 100, "final_length": 1000}, (4000, 100, 1000)),
        (2048, {"micro": 1024}, (1024, 256, 1024)),
        (2048, {"final_share": 0.0, "final_length": 999}, (4096, 256, 999)),
    ],
)
def test_lengths_that_are_not_given_fit(
    context: int, given: dict[str, float], expected: tuple[int, ...]
) -> None:
    settings = {
        "batch": 8192,
        "micro": None,
        "length": None,
        "final_length": None,
        "final_share": 0.2,
    }
    found = fit_lengths(settings | given, context)
    assert (found["micro"], found["length"], found["final_length"]) == expected
    made = TrainOptions(**found, shape=replace(TINY.shape, context=context))
    assert (
        made.micro % made.first_length
        == made.micro % made.last_length
        == made.batch % made.micro
        == 0
    )


def test_lengths_that_cannot_fit_are_named() -> None:
    settings = {
        "batch": 8192,
        "micro": None,
        "length": 300,
        "final_length": None,
        "final_share": 0.2,
    }
    with pytest.raises(OptionError, match="micro: expected a multiple of length 300, found 4096"):
        LoopOptions(**fit_lengths(settings, 2048))
    with pytest.raises(OptionError, match="micro: expected a divisor of batch 8191, found 4096"):
        LoopOptions(**fit_lengths(settings | {"batch": 8191, "length": None}, 2048))


def test_only_lengths_that_are_read_have_rules() -> None:
    assert replace(TINY, final_share=0.0, final_length=1000).last_length == 32
    assert replace(TINY, final_share=1.0, length=1000).first_length == 64
    with pytest.raises(OptionError, match=r"length: expected an integer in 1..64, found 1000"):
        replace(TINY, length=1000)


def test_sequences_of_a_draft_fit_its_target_too() -> None:
    assert (
        replace(TINY_DRAFT, shape=replace(TINY_DRAFT.shape, context=128), final_length=128).longest
        == 128
    )
    with pytest.raises(
        OptionError, match=r"final-length: expected an integer in 1..100, found 128"
    ):
        replace(
            TINY_DRAFT, shape=replace(TINY_DRAFT.shape, context=128), context=100, final_length=128
        )


@pytest.mark.parametrize(
    ("length", "final_length", "final_share"),
    [(32, 64, 0.25), (32, 64, 0.0), (128, 16, 1.0), (64, 32, 0.9)],
)
def test_least_text_has_a_sequence_for_each_part(
    tmp_path: Path, length: int, final_length: int, final_share: float
) -> None:
    options = replace(
        TINY,
        length=length,
        final_length=final_length,
        final_share=final_share,
        batch=256,
        micro=128,
    )
    least = options.min_text_tokens
    for tokens in (least, least + 1, least + 7):
        (tmp_path / "train.bin").write_bytes(bytes(2 * tokens))
        phases = two_phases(tmp_path / "train.bin", options, 300)
        shares = (1 - final_share, final_share)
        assert all(len(phase) for phase, share in zip(phases, shares, strict=True) if share)
    (tmp_path / "train.bin").write_bytes(bytes(2 * (8 * least // 10)))
    with pytest.raises(OptionError, match="text: expected at least"):
        two_phases(tmp_path / "train.bin", options, 300)
