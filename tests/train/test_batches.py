from pathlib import Path

import numpy as np
import pytest
import torch

from pronk.base.errors import OptionError
from pronk.train.batches import Mixture, Sequences
from pronk.train.corpus.encoder import token_dtype


def test_sequences_cover_their_part_once(tmp_path: Path) -> None:
    tokens = np.arange(1001, dtype=np.uint16)
    tokens.tofile(tmp_path / "t.bin")
    first = Sequences(tmp_path / "t.bin", 320, 10, seed=3, stop=0.6)
    last = Sequences(tmp_path / "t.bin", 320, 20, seed=3, start=0.6)
    inputs, targets = first.batch(0, len(first))
    assert sorted(inputs.flatten().tolist()) == list(range(600))
    assert torch.equal(targets, inputs + 1)
    assert inputs[:, 0].tolist() != sorted(inputs[:, 0].tolist())
    assert sorted(last.batch(0, len(last))[0].flatten().tolist()) == list(range(600, 1000))
    assert torch.equal(first.batch(len(first) - 1, 2)[0][1], inputs[0])


def test_mixture_takes_its_share_evenly_whatever_the_batch(tmp_path: Path) -> None:
    np.arange(401, dtype=np.uint16).tofile(tmp_path / "a.bin")
    np.arange(1000, 1201, dtype=np.uint16).tofile(tmp_path / "b.bin")
    first, second = (Sequences(tmp_path / name, 320, 10, seed=1) for name in ("a.bin", "b.bin"))
    mixture = Mixture(first, second, 0.3)
    whole = mixture.batch(0, 100)[0][:, 0]
    assert int((whole >= 1000).sum()) == 30
    for size in (1, 7):
        counts = [
            int((mixture.batch(start, size)[0] >= 1000).sum()) // 10 for start in range(0, 98, size)
        ]
        assert sum(counts) == int(98 * 0.3)
        assert max(counts) - min(counts) <= 1
    inputs, targets = mixture.batch(33, 5)
    assert torch.equal(targets, inputs + 1)
    rows = {tuple(row.tolist()) for row in mixture.batch(0, 20)[0] if row[0] >= 1000}
    assert rows == {tuple(row.tolist()) for row in second.batch(0, 6)[0]}


def test_large_vocabularies_have_wider_ids(tmp_path: Path) -> None:
    assert np.iinfo(token_dtype(65536)).max == 65535
    ids = np.array([70_000, 5, 150_000], dtype=token_dtype(150_001))
    ids.tofile(tmp_path / "t.bin")
    inputs, targets = Sequences(tmp_path / "t.bin", 150_001, 2, seed=0).batch(0, 1)
    assert (inputs.tolist(), targets.tolist()) == ([[70_000, 5]], [[5, 150_000]])


def test_too_little_text_is_named(tmp_path: Path) -> None:
    np.arange(30, dtype=np.uint16).tofile(tmp_path / "t.bin")
    with pytest.raises(
        OptionError, match="expected at least 31 tokens for sequences of 30, found 29"
    ):
        Sequences(tmp_path / "t.bin", 320, 30, seed=0).check()
