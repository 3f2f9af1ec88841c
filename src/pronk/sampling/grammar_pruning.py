"""Removal of draft tokens that the guide forbids.

The target would compute the rows of such draft tokens only to reject them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pronk.sampling.logits_processors import GuideProcessor
from pronk.sampling.tree import TokenTree


def visit(
    tokens: Sequence[int],
    children: Sequence[Sequence[int]],
    guide: GuideProcessor,
    on_node: Callable[[int], bool],
) -> None:
    """Visit a draft tree depth-first, with a guide's processor at the parent of each visited node.

    Args:
        tokens: token id of each node; the root's token is the last token of the text.
        children: children of each node.
        guide: processor that has consumed the text, and is rolled back to the text at the end.
        on_node: called with each visited node except the root; returns whether to visit the node's
            children.
    """
    depth = 0
    stack = [(child, 0) for child in reversed(children[0])]
    try:
        while stack:
            node, node_depth = stack.pop()
            guide.rollback(depth - node_depth)
            depth = node_depth
            if on_node(node):
                guide.advance(tokens[node])
                depth += 1
                stack += [(child, depth) for child in reversed(children[node])]
    finally:
        guide.rollback(depth)


def prune(tree: TokenTree, guide: GuideProcessor) -> TokenTree:
    """Return the tree without the draft tokens that the guide forbids, and the nodes below them.

    Nodes that verification never accepts (:attr:`TokenTree.acceptable` is False) stay.
    """
    children = [[*tree.children(node).values()] for node in range(len(tree))]
    kept = {node for node, acceptable in enumerate(tree.acceptable) if not acceptable}
    kept.add(0)

    def keep_if_allowed(node: int) -> bool:
        if not guide.allows(tree.tokens[node]):
            return False
        kept.add(node)
        return True

    visit(tree.tokens, children, guide, keep_if_allowed)
    return tree if len(kept) == len(tree) else tree.keep(kept)
