"""Static trees for heads that predict independently: the ranks of each head that are worth a row.

Head ``d`` (1 is the first) predicts the token of depth ``d`` without seeing the draft tokens above it. A node is
therefore a *path of ranks*: ``(0, 2)`` is the third likeliest token of head 2 below the likeliest one of head 1. ::

    root ┬ (0,) ┬ (0, 0) ─ (0, 0, 0)
         │      └ (0, 1)
         └ (1,) ─ (1, 0)

Let ``a[d][r]`` be the frequency with which rank ``r`` of head ``d`` is the target's token. If the heads are
independent, a node is accepted with the probability ``a[1][r1] a[2][r2] …``, and a forward pass accepts the sum of
these over its nodes. The best tree of a given size is built greedily: add the likeliest node whose parent is in the
tree (Cai et al. 2024, 2.3.3). A child is never likelier than its parent, so these are the likeliest nodes of all.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from pronk.checks import check_integer
from pronk.drafters.shared.trie import Frontier
from pronk.errors import OptionError

__all__ = [
    "MAX_NODES",
    "MAX_RANKS",
    "Path",
    "best_paths",
    "check_paths",
    "check_tree",
    "main_chain_first",
    "path_probability",
]

MAX_NODES = 127  # with the root 128 rows, the most that a drafter may propose
MAX_RANKS = 64

# Ranks from the root down; 0 is the likeliest token.
Path = tuple[int, ...]


def best_paths(accuracies: Sequence[Sequence[float]], size: int) -> tuple[Path, ...]:
    """Return the ``size`` likeliest paths, the likeliest first; fewer if there are not so many.

    Args:
        accuracies: ``[head][rank]``, 0..1. A rank that is right more often than a better rank counts as that one, so
            that a tree never has a rank without the better ones.
        size: number of nodes below the root.
    """
    monotone = [[min(row[: rank + 1]) for rank in range(len(row))] for row in accuracies]
    frontier, paths = Frontier[Path](), list[Path]()

    def push(gain: float, path: Path) -> None:
        if len(path) <= len(monotone) and path[-1] < len(monotone[len(path) - 1]):
            frontier.push(gain * monotone[len(path) - 1][path[-1]], path)

    push(1.0, (0,))
    while frontier and len(paths) < size:
        gain, path = frontier.pop()
        paths.append(path)
        push(gain, (*path, 0))
        push(path_probability(monotone, path[:-1]), (*path[:-1], path[-1] + 1))
    return tuple(paths)


def path_probability(accuracies: Sequence[Sequence[float]], path: Path) -> float:
    """Return the probability that ``path`` is accepted: the product along it."""
    return prod(row[rank] for row, rank in zip(accuracies, path, strict=False))


def check_paths(drafter: str, option: str, paths: object, depth: int) -> tuple[Path, ...]:
    """Return the paths of a user's tree, a parent before its children; OptionError if it is no tree."""
    if not isinstance(paths, tuple | list) or not 1 <= len(paths) <= MAX_NODES:
        msg = (
            f"{drafter}: {option}: expected 1..{MAX_NODES} paths of ranks, as in ((0,), (1,), (0, 0)), found {paths!r}"
        )
        raise OptionError(msg)
    found = list[Path]()
    for path in paths:
        ranks = isinstance(path, tuple | list) and all(type(rank) is int and 0 <= rank < MAX_RANKS for rank in path)
        if not ranks or not 1 <= len(path) <= depth:
            msg = f"{drafter}: {option}: expected paths of 1..{depth} ranks in 0..{MAX_RANKS - 1}, found {path!r}"
            raise OptionError(msg)
        path_tuple = tuple(path)
        if path_tuple in found or (len(path_tuple) > 1 and path_tuple[:-1] not in found):
            wrong = "twice" if path_tuple in found else f"without {path_tuple[:-1]} before it"
            msg = f"{drafter}: {option}: expected each path once and after its parent, found {path_tuple} {wrong}"
            raise OptionError(msg)
        found.append(path_tuple)
    return tuple(found)


def check_tree(drafter: str, tree: object, depth: int) -> int | tuple[Path, ...] | None:
    """Return the option ``tree``: a number of nodes, paths with the main chain first, or ``None``."""
    if isinstance(tree, int):
        check_integer(f"{drafter}: tree", tree, 1, MAX_NODES)
    return (
        tree if tree is None or isinstance(tree, int) else main_chain_first(check_paths(drafter, "tree", tree, depth))
    )


def main_chain_first(paths: Sequence[Path]) -> tuple[Path, ...]:
    """Move the chain of likeliest children to the front; the other paths keep their order.

    The cache slots of the main chain are consecutive, as in decoding without speculation.
    """
    chain = list[Path]()
    while children := [path for path in paths if path[:-1] == (chain[-1] if chain else ())]:
        chain.append(min(children))
    return (*chain, *(path for path in paths if path not in chain))
