"""Tree parallelism: the rows that a process computes for a shard of a request's tree."""

from __future__ import annotations

from collections.abc import Sequence

from pronk import TokenTree
from pronk.backends import BatchEntry, BlockTable
from pronk.parallel.tree_partition import TreeShard
from pronk.parallel.wire_format import WorkRows


def own_logits_nodes(entry: BatchEntry, shard: TreeShard) -> list[int]:
    """Return the nodes of a tree shard whose logits the driver needs.

    Recomputed ancestors are left out: another process computes their logits.
    """
    return [node for node in shard.own_nodes if node in entry.logits_nodes]


def make_work_rows(entry: BatchEntry, shard: TreeShard, lead: Sequence[int]) -> WorkRows:
    """Return the rows that a process computes for one tree shard.

    ``lead`` are the last committed tokens, whose KV rows the process lacks. The process recomputes
    their rows first, as a chain above the shard. With the lead ``x y``, and the shard of nodes 4
    and 5 with the recomputed root::

        lead, nodes of the entry's tree     x  y  0  4  5
        nodes of the new tree               0  1  2  3  4      first_own is 3
    """
    entry = entry._replace(library_sampler=None)  # the driver verifies the tree
    is_whole_tree = shard.nodes == tuple(range(len(entry.tree))) and not shard.num_ancestors
    if is_whole_tree and not lead:
        return WorkRows(entry, 0)
    num_lead = len(lead)
    new_nodes = {node: new_node for new_node, node in enumerate(shard.nodes, num_lead)}
    logits_nodes = [new_nodes[node] for node in own_logits_nodes(entry, shard)]
    tree = _tree_of_shard(entry.tree, new_nodes, lead)
    first_logits_node = logits_nodes[0] if logits_nodes else len(tree)
    assert logits_nodes == [*range(first_logits_node, len(tree))]
    new_entry = entry._replace(
        block_table=_table_before(entry.block_table, num_lead) if lead else entry.block_table,
        tree=tree,
        logits_nodes=range(first_logits_node, len(tree)),
    )
    return WorkRows(new_entry, num_lead + shard.num_ancestors)


def _tree_of_shard(tree: TokenTree, new_nodes: dict[int, int], lead: Sequence[int]) -> TokenTree:
    """Return the nodes of a shard as a tree, below the chain of the tokens ``lead``.

    ``new_nodes`` are the numbers of the nodes in the new tree, by their numbers in ``tree``.
    """
    num_lead = len(lead)
    tokens = [*lead]
    parents = [*range(-1, num_lead - 1)]
    for node in new_nodes:
        tokens.append(tree.tokens[node])
        parents.append(num_lead - 1 if node == 0 else new_nodes[tree.parents[node]])
    # The draft tokens are not verified here, but in the driver.
    acceptable = (True,) + (False,) * (len(tokens) - 1)
    return TokenTree(tuple(tokens), tuple(parents), acceptable)


def _table_before(block_table: BlockTable, num_lead: int) -> BlockTable:
    """Return a table of the same blocks without the last ``num_lead`` committed tokens."""
    length = block_table.length - num_lead
    shorter = BlockTable(list(block_table.blocks), block_table.num_released, length)
    shorter.update_derived()
    return shorter
