"""Clusters of rows: one size, each row once, similar rows together."""

from pathlib import Path

import numpy as np
import pytest

from pronk.drafting.shared import token_clusters
from pronk.drafting.shared.token_clusters import cluster_means, cluster_rows, stored_clusters

dice = np.random.default_rng(0)
ROWS = dice.standard_normal((60, 8)).astype(np.float32)


@pytest.mark.parametrize("num_clusters", [1, 2, 3, 5, 12, 60])
def test_each_row_is_in_one_cluster(num_clusters: int) -> None:
    clusters = cluster_rows(ROWS, num_clusters)
    assert clusters.shape == (num_clusters, 60 // num_clusters)
    assert clusters.dtype == np.int32
    assert sorted(clusters.reshape(-1).tolist()) == list(range(60))
    assert (np.diff(clusters, axis=1) > 0).all()


def test_similar_rows_are_in_one_cluster() -> None:
    centers = 10 * dice.standard_normal((7, 16))
    owners = dice.permutation(np.repeat(np.arange(7), 20))
    rows = (centers[owners] + dice.standard_normal((140, 16))).astype(np.float32)
    clusters = cluster_rows(rows, 7)
    assert all(len(set(owners[members])) == 1 for members in clusters)
    means = cluster_means(rows, clusters)
    found = [means[number] - centers[owners[members[0]]] for number, members in enumerate(clusters)]
    assert np.abs(found).max() < 2.0


def test_the_result_depends_on_rows_and_seed_alone() -> None:
    first = cluster_rows(ROWS, 12)
    np.testing.assert_array_equal(first, cluster_rows(ROWS.copy(), 12))
    other = cluster_rows(ROWS[::-1].copy(), 12)
    assert not np.array_equal(first, other)


def test_equal_rows() -> None:
    clusters = cluster_rows(np.ones((12, 4), np.float32), 3)
    assert sorted(clusters.reshape(-1).tolist()) == list(range(12))


def test_clusters_of_large_heads_are_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    expected = cluster_rows(ROWS, 12)
    np.testing.assert_array_equal(stored_clusters(ROWS, 12), expected)
    assert not [*tmp_path.iterdir()]
    monkeypatch.setattr(token_clusters, "_MIN_STORED", ROWS.size)
    np.testing.assert_array_equal(stored_clusters(ROWS, 12), expected)
    (file,) = (tmp_path / ".cache/pronk/token-clusters").iterdir()
    other = expected[::-1].copy()
    file.write_bytes(other.tobytes())
    np.testing.assert_array_equal(stored_clusters(ROWS, 12), other)  # read, and not computed
    assert not np.array_equal(stored_clusters(ROWS + 1.0, 12), other)
    assert stored_clusters(ROWS, 6).shape == (6, 10)
    for damaged in (b"", b"abc", file.read_bytes()[:-1]):
        file.write_bytes(damaged)
        np.testing.assert_array_equal(stored_clusters(ROWS, 12), expected)
    file.write_bytes(bytes(expected.nbytes))
    np.testing.assert_array_equal(stored_clusters(ROWS, 12), expected)


def test_without_a_writable_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_clusters, "_MIN_STORED", ROWS.size)
    file = tmp_path / "file"
    file.write_bytes(b"")
    monkeypatch.setattr(Path, "home", lambda: file)
    assert stored_clusters(ROWS, 12).shape == (12, 5)
