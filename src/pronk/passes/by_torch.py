"""Stages of a pass in torch: where there are no kernels for a model or a device."""

from __future__ import annotations

import torch
from torch import Tensor

from pronk.cache.blocks import BlockTable
from pronk.cache.paged import PagedCache
from pronk.model.decoder import Decoder
from pronk.passes.attention import CrossAttention, PagedAttention
from pronk.passes.stage import Beside, Stage

__all__ = ["TorchPasses"]


class TorchPasses:
    """Stages in torch."""

    usable = True

    def __init__(self, decoder: Decoder, cache: PagedCache, beside: Beside | None) -> None:
        self.decoder, self.cache, self.beside, self.waited = decoder, cache, beside, 0.0

    @torch.inference_mode()
    def run(self, stage: Stage, rows: Tensor | None) -> tuple[Tensor, dict[int, Tensor], Tensor | None]:
        """Rows ``[rows, hidden]`` through a stage; ``None`` where they begin as embeddings."""
        decoder, cache = self.decoder, self.cache
        tokens, positions, spans = torch.tensor(stage.places(), dtype=torch.int64, device=cache.device)
        segments = [segment for _, segment in stage.jobs]
        attend = PagedAttention(decoder.config, cache, segments)
        if self.beside is not None:
            other = self.beside
            tables = [job.beside or BlockTable() for job, _ in stage.jobs]
            attend = CrossAttention(
                decoder.config,
                cache,
                segments,
                (other.decoder.config, other.cache, other.layers),
                tables,
                other.decoder.rope(positions, spans, other.cache.dtype),
            )
        x = decoder.embed(tokens, positions, cache.dtype) if rows is None else rows
        rope = decoder.rope(positions, spans, cache.dtype)
        collected: dict[int, Tensor] = {}
        for layer, x in decoder.run(x, rope, attend, stage.start, stage.stop):  # noqa: B020 - the state goes through
            cache.write_hidden(layer, attend.slots, x)
            if layer in stage.collect:
                collected[layer] = x
        if stage.wanted is None:
            return x, collected, None
        # The choice is made on the CPU, where the noise is the same whatever the device.
        logits = decoder.logits(x[torch.tensor(list(stage.wanted), dtype=torch.int64, device=x.device)]).cpu()
        return x, collected, logits
