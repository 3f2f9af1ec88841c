"""Keys and values of a paged cache as plain arrays."""

from pronk.base.arrays import Array
from pronk.cache.blocks import BlockTable
from pronk.cache.layout import choose_layouts
from pronk.cache.paged import PagedCache


def read_layer(cache: PagedCache, layer: int, block_table: BlockTable) -> list[Array]:
    """Return keys and values ``[kv_heads, tokens, head_dim]`` of a layer with attention; not in 8
    bits.
    """
    slots = cache.slots(block_table, 0, block_table.length)
    pools = zip(
        choose_layouts(cache.kv_dtype), (cache.keys[layer], cache.values[layer]), strict=True
    )
    stored = [
        layout.parts(pool)[0][:, slots // layout.panel, :, slots % layout.panel]
        for layout, pool in pools
    ]
    return [
        each.reshape(len(slots), cache.config.num_kv_heads, -1).swapaxes(0, 1) for each in stored
    ]
