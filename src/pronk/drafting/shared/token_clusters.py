"""Clusters of tokens with similar rows of an LM head, all of one size.

A set of rows that becomes ``c`` clusters is divided into two sets of ``c // 2`` and ``c - c // 2``
clusters, along the direction in which the rows vary most (their first principal component, Pearson
1901), and so on. Unlike k-means, this gives clusters of exactly one size in ``log2 c`` passes. For
152,000 tokens it takes seconds, so the clusters of large heads are stored in
``~/.cache/pronk/token-clusters``.
"""

from __future__ import annotations

from contextlib import suppress
from hashlib import sha256
from pathlib import Path

import numpy as np

from pronk.base.arrays import FLOAT32, Array
from pronk.base.files.atomic import replace_file
from pronk.sampling.draft_token import DraftIds

# Number of multiplications by the covariance matrix that approximate the principal component.
_ROUNDS = 6
_VERSION = 1  # of this algorithm, part of the names of stored clusters
_MIN_STORED = 1 << 24  # number of values of the rows from which on clusters are stored


def stored_clusters(rows: Array, num_clusters: int) -> DraftIds:
    """Return the clusters of :func:`cluster_rows`, from the disk if they were computed before.

    The file's name is a digest of the rows. A damaged file is replaced, and without a writable home
    folder none is written.
    """
    if rows.size < _MIN_STORED:
        return cluster_rows(rows, num_clusters)
    digest = sha256(f"{_VERSION} {num_clusters} {rows.shape}".encode())
    digest.update(np.ascontiguousarray(rows).data)
    name = f"{digest.hexdigest()[:32]}.i32"
    with suppress(OSError, ValueError, RuntimeError):
        found = np.frombuffer((_folder() / name).read_bytes(), np.int32)
        if np.array_equal(np.sort(found), np.arange(len(rows))):
            return found.reshape(num_clusters, -1)
    clusters = cluster_rows(rows, num_clusters)
    with suppress(OSError, RuntimeError):
        _folder().mkdir(parents=True, exist_ok=True)
        with replace_file(_folder() / name, shared=True) as file:
            file.write(clusters.tobytes())
    return clusters


def _folder() -> Path:
    """Return the folder of stored clusters; raise RuntimeError without a home folder."""
    return Path.home() / ".cache" / "pronk" / "token-clusters"


def cluster_rows(rows: Array, num_clusters: int, seed: int = 0) -> DraftIds:
    """Divide rows into clusters of one size, of rows that are similar.

    The result depends on the arguments alone.

    Args:
        rows: float32 ``[rows, hidden]``.
        num_clusters: number of clusters, a divisor of the number of rows.
        seed: seed of the directions from which the search for principal components begins.

    Returns:
        The numbers of the rows in each cluster, int32 ``[clusters, size]``, ascending.
    """
    size = len(rows) // num_clusters
    assert size * num_clusters == len(rows), "expected a divisor of the number of rows"
    dice = np.random.default_rng(seed)
    clusters = list[Array]()
    # sets of rows and their numbers of clusters, the next one last
    sets = [(np.arange(len(rows), dtype=np.int32), num_clusters)]
    while sets:
        members, count = sets.pop()
        if count == 1:
            clusters.append(np.sort(members))
            continue
        own = rows if count == num_clusters else rows[members]
        order = np.argsort(_main_coordinates(own, dice), kind="stable")
        first = count // 2
        sets.append((members[order[first * size :]], count - first))
        sets.append((members[order[: first * size]], first))
    return np.stack(clusters)


def _main_coordinates(rows: Array, dice: np.random.Generator) -> Array:
    """Return the coordinate of each row along the first principal component, up to a constant."""
    mean = rows.mean(axis=0)
    direction = dice.standard_normal(rows.shape[1]).astype(FLOAT32)
    for _ in range(_ROUNDS):
        coordinates = rows @ direction
        coordinates -= coordinates.mean()
        direction = coordinates @ rows - coordinates.sum() * mean
        # equal rows vary in no direction
        direction /= max(float(np.linalg.norm(direction)), np.finfo(FLOAT32).tiny)
    return rows @ direction


def cluster_means(rows: Array, clusters: DraftIds) -> Array:
    """Return the mean of the rows in each cluster, float32 ``[clusters, hidden]``."""
    return np.stack([rows[members].mean(axis=0) for members in clusters]).astype(FLOAT32)
