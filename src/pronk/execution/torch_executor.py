"""Executor that computes with torch, for models or devices without kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from pronk.execution.attention import CrossAttention, PagedAttention
from pronk.execution.forward_job import CrossAttentionSource, LayerRange
from pronk.kv_cache.blocks import BlockTable
from pronk.kv_cache.paged import PagedCache
from pronk.models.decoder import Decoder

__all__ = ["TorchExecutor"]


class TorchExecutor:
    """Implementation of :class:`~pronk.execution.forward_job.Executor` with torch, in this process."""

    is_usable = True

    def __init__(self, decoder: Decoder, cache: PagedCache, cross_source: CrossAttentionSource | None) -> None:
        self.decoder, self.cache, self.cross_source = decoder, cache, cross_source
        self.communication_seconds = 0.0

    @torch.inference_mode()
    def run(self, layer_range: LayerRange, rows: Tensor | None) -> tuple[Tensor, dict[int, Tensor], Tensor | None]:
        """Run a range of layers with torch; for the arguments and the three results, see ``Executor.run``."""
        decoder, cache = self.decoder, self.cache
        tokens, positions, spans = torch.tensor(layer_range.row_inputs(), dtype=torch.int64, device=cache.device)
        segments = [segment for _, segment in layer_range.jobs]
        attend = PagedAttention(decoder.config, cache, segments)
        if self.cross_source is not None:
            cross = self.cross_source
            cross_block_tables = [job.cross_block_table or BlockTable() for job, _ in layer_range.jobs]
            attend = CrossAttention(
                decoder.config,
                cache,
                segments,
                (cross.decoder.config, cross.cache, cross.layers),
                cross_block_tables,
                cross.decoder.rope(positions, spans, cross.cache.dtype),
            )
        x = decoder.embed(tokens, positions, cache.dtype) if rows is None else rows
        rope = decoder.rope(positions, spans, cache.dtype)
        collected: dict[int, Tensor] = {}
        for layer, x in decoder.run(x, rope, attend, layer_range.start, layer_range.stop):  # noqa: B020 - x is the running state
            cache.write_hidden(layer, attend.slots, x)
            if layer in layer_range.collect:
                collected[layer] = x
        if layer_range.logits_rows is None:
            return x, collected, None
        selected = torch.tensor(list(layer_range.logits_rows), dtype=torch.int64, device=x.device)
        # The sampler runs on the CPU, so that its noise does not depend on the device of the model.
        return x, collected, decoder.logits(x[selected]).cpu()
