"""Log-probabilities of alternative texts after a prompt, with common beginnings computed once.

The alternatives are the paths of one token tree, whose root is the prompt's last token. The logits
of a row do not depend on sibling rows, so the sums are bit-equal to those of each alternative
alone. The last token of an alternative needs no row, because only the logits before it count. If
the tree exceeds the row limit (:attr:`Engine.max_tree_nodes`), the alternatives are split among
several forward passes.
"""

from __future__ import annotations

from collections.abc import Sequence

from pronk.base.arrays import Array, is_finite
from pronk.base.errors import PromptError, PronkError
from pronk.drafting.trie import Trie
from pronk.engine.engine import Engine
from pronk.models.adapters import Adapter
from pronk.sampling.log_probs import log_probs
from pronk.sampling.sampler import NotFiniteError
from pronk.sampling.tree import TokenTree

Tokens = tuple[int, ...]


def score(
    engine: Engine,
    prompt: Sequence[int],
    alternatives: Sequence[Sequence[int]],
    adapter: Adapter | None = None,
) -> list[float]:
    """Return the log-probability of each alternative (the token ids of one text) after a prompt.

    Raises ``PromptError`` if the prompt has a single token, or an alternative exceeds the limit of
    a tree or of the context; ``CacheFullError`` if prompt and tree do not fit into the KV cache;
    ``PronkError`` if logits are infinite or NaN.
    """
    max_nodes = engine.max_tree_nodes - 1
    max_length = max(map(len, alternatives))
    if len(prompt) < 2:
        msg = "choose: expected a prompt of at least two tokens, found one; lengthen the prompt"
        raise PromptError(msg)
    if max_length - 1 > max_nodes:
        remedy = "shorten the option"
        if engine.max_tree_nodes < engine.scheduler.max_tree:
            remedy += ", or raise kv_memory"
        msg = (
            f"choose: expected options of at most {max_nodes + 1} tokens, found one of "
            f"{max_length}; {remedy}"
        )
        raise PromptError(msg)
    context = engine.runner.decoder.config.context
    length = len(prompt) + max_length
    if length > context:
        msg = (
            f"choose: expected prompt and option of at most {context} tokens, found {length}; "
            "shorten them"
        )
        raise PromptError(msg)
    distinct = sorted({tuple(alternative) for alternative in alternatives})
    groups = _split(distinct, max_nodes)
    trees = [_make_tree(prompt[-1], group) for group in groups]
    sums = dict[Tokens, float]()
    all_logits = engine.tree_logits(prompt[:-1], trees, adapter)
    for group, tree, logits in zip(groups, trees, all_logits, strict=True):
        for alternative in group:
            sums[alternative] = _log_probability(alternative, tree, logits)
    return [sums[tuple(alternative)] for alternative in alternatives]


def _split(alternatives: Sequence[Tokens], max_nodes: int) -> list[list[Tokens]]:
    """Split sorted alternatives into groups whose trees have at most ``max_nodes`` nodes each.

    The root is not counted.
    """
    groups = list[list[Tokens]]()
    nodes = set[Tokens]()
    for alternative in alternatives:
        path = {alternative[:length] for length in range(1, len(alternative))}
        if not groups or len(nodes | path) > max_nodes:
            groups.append([])
            nodes = set()
        nodes |= path
        groups[-1].append(alternative)
    return groups


def _make_tree(root: int, alternatives: Sequence[Tokens]) -> TokenTree:
    """Return a tree with a path below ``root`` for each alternative.

    The path has the tokens of the alternative without the last one, which needs no row.
    """
    trie = Trie(root)
    for alternative in alternatives:
        node = 0
        for token in alternative[:-1]:
            node = trie.add(node, token, 1.0, ("", 0))
    return trie.tree(len(trie))


def _log_probability(alternative: Tokens, tree: TokenTree, logits: Array) -> float:
    """Return the sum of the log-probabilities of one alternative's tokens.

    ``logits`` ``[nodes, vocab]`` are those of the nodes of ``tree``.
    """
    nodes = [0]
    total = 0.0
    for token in alternative[:-1]:
        nodes.append(tree.children(nodes[-1])[token])
    rows = logits[nodes]
    if not is_finite(rows):
        msg = (
            "choose: expected finite logits, found infinity or NaN; check the weights of the model"
        )
        raise PronkError(msg) from NotFiniteError()
    for row, token in zip(rows, alternative, strict=True):
        total += log_probs(row, [token])[0]
    return total
