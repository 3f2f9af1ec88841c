"""A language model that learns to predict several tokens at once (Gloeckle et al. 2024).

The loss of equation 2 over ``n`` heads, the first of which is the model's own::

    L = - Σ_t Σ_(i=1..n) log P(x[t+i] | x[..t])

where each head's share is its mean over the rows that have such a token.

What is exported is an ordinary checkpoint, whose own head predicts the next token, and in its folder ``heads`` the
others, for the drafter ``multi_token``. In a model of ``L`` layers the heads read, by their order::

    parallel       the output of layer L - 1; the model's last layer is the first head
    causal         the output of layer L, which is the first head's
    anticausal     the output of layer L - n; the model's last layers are the heads, the furthest first
    linear         the output of layer L; the first head is the norm and the unembedding alone
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from math import inf
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn

from pronk.architecture.config import ModelConfig
from pronk.checks import check_choice, check_integer
from pronk.drafters.from_target.modules.files import FORMAT
from pronk.drafters.from_target.modules.heads import KINDS, ORDERS, UNEMBEDDINGS, HeadsShape, MultiTokenHeads
from pronk.errors import OptionError
from pronk.llm import LLM
from pronk.models.decoder import Decoder
from pronk.models.fingerprint import Fingerprint
from pronk.train.attention import DenseAttention
from pronk.train.card import heads_card
from pronk.train.export import export_drafter
from pronk.train.heads import Stage, ahead, check_lengths, describe, head_by_head, head_stages
from pronk.train.lm import TextModel
from pronk.train.loop import Passed
from pronk.train.options import ModelShape
from pronk.train.served import SERVED_TOKENS, beginnings, is_served, measure
from pronk.train.text_loss import text_loss

__all__ = ["FutureModel", "FutureTokens", "future_shape"]


def future_shape(
    model: ModelShape, tokens: int, kind: str, order: str, unembeddings: str, mlp: int | None = None
) -> HeadsShape | None:
    """The extra heads of a model that predicts ``tokens`` tokens at a time; ``None`` for one token.

    Args:
        model: the model, its own head included.
        tokens: 1 is the next token alone.
        kind: see :class:`~pronk.drafters.from_target.modules.heads.HeadsShape`, also for the next two.
        order: of the heads.
        unembeddings: of the heads.
        mlp: width of a head; the model's by default.

    Raises:
        OptionError: a value out of its range, too few layers, or heads that cannot be layers of the model.
    """
    if tokens == 1:
        return None
    check_integer("future-tokens", tokens, 1, 64)
    check_choice("head-kind", kind, KINDS)
    check_choice("head-order", order, ORDERS)
    check_choice("unembeddings", unembeddings, UNEMBEDDINGS)
    width = check_integer("head-mlp", model.mlp if mlp is None else mlp, 1)
    inside = {"parallel": 1, "causal": 0, "anticausal": tokens}.get(order, 0) if kind == "transformer" else 0
    if order == "anticausal" and kind != "transformer":
        msg = f"head-order: expected parallel or causal for {kind} heads, found {order}"
        raise OptionError(msg)
    if order == "anticausal" and width != model.mlp:
        msg = f"head-mlp: expected {model.mlp} for anticausal heads, the last layers of the model, found {width}"
        raise OptionError(msg)
    if model.layers <= inside:
        msg = f"layers: expected more than {inside} for {order} heads of {tokens} tokens, found {model.layers}"
        raise OptionError(msg)
    return HeadsShape(tokens - 1, model.layers - inside, width, kind, order, unembeddings)


class FutureModel(nn.Module):
    """A decoder and the heads beside its own; anticausal ones share their layers with it."""

    def __init__(self, config: ModelConfig, shape: HeadsShape) -> None:
        super().__init__()
        self.decoder = Decoder(config)
        inner = list(self.decoder.layers)[shape.layer : -1][::-1] if shape.order == "anticausal" else None
        self.heads = MultiTokenHeads(shape, config, inner)

    def initialize(self, seed: int) -> None:
        """First weights; those of the decoder are the same as without heads."""
        self.heads.initialize(torch.Generator().manual_seed(seed + 1))
        self.decoder.initialize(torch.Generator().manual_seed(seed))

    def trunk(self, tokens: Tensor) -> Tensor:
        """What the heads read, ``[batch * length, hidden]``, of ``tokens`` ``[batch, length]``."""
        positions, rope, attend = self._batch(tokens)
        x = self.decoder.embed(tokens.reshape(-1), positions, torch.float32)
        *_, (_, z) = self.decoder.run(x, rope, attend, 0, self.heads.shape.layer)
        return z

    def stages(self, tokens: Tensor) -> list[Stage]:
        """All heads above the trunk of ``tokens``, in the order in which they are applied; number 0 is the model's."""
        _, rope, attend = self._batch(tokens)
        others, shape, last = head_stages(self.heads, rope, attend), self.heads.shape, len(self.decoder.layers) - 1
        index = [number + 1 for number, _ in others]
        stages: list[Stage] = [(number, apply) for number, (_, apply) in zip(index, others, strict=True)]
        whole = shape.layer > last  # the trunk is all of the model

        def first(x: Tensor) -> Tensor:
            out: Tensor = x if whole else self.decoder.layers[last](x, rope, last, attend)
            return out

        return [*stages, (0, first)] if shape.order == "anticausal" else [(0, first), *stages]

    def scored(self, number: int, x: Tensor) -> tuple[Tensor, Tensor]:
        """The rows ``[rows, hidden]`` that go into the unembedding of a head, and its weight ``[vocab, hidden]``."""
        if not number:
            return self.decoder.norm(x), self.decoder.embedding
        own = self.heads.unembeddings[number - 1].get_parameter("weight") if self.heads.unembeddings else None
        return self.heads.norm(number - 1, x), self.decoder.embedding if own is None else own

    def _batch(self, tokens: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor] | None, DenseAttention]:
        batch, length = tokens.shape
        positions = torch.arange(length, device=tokens.device).repeat(batch)
        return positions, self.decoder.rope(positions, positions + 1, torch.float32), DenseAttention(batch, length)


class FutureTokens(TextModel[FutureModel]):
    """See :class:`~pronk.train.loop.Objective`; the loss is that of equation 2, one head at a time.

    Args:
        folder: as for :class:`~pronk.train.lm.TextModel`.
        options: with ``heads``.

    Raises:
        OptionError: as there, or sequences that end before what the last head is to predict.
    """

    # Of matrix products; the rest is float32.
    dtype = torch.bfloat16

    def build(self) -> FutureModel:
        """The model and its heads."""
        shape: HeadsShape = self.options.heads
        check_lengths(self.options, shape.num_heads)
        model = FutureModel(self.config, shape)
        model.initialize(self.options.seed)
        self._trunk = torch.compile(model.trunk) if self.options.compile else model.trunk
        return model

    @property
    def decoder(self) -> Decoder:
        """The model without the heads beside its own."""
        return self.module.decoder

    def backward(self, inputs: Tensor, targets: Tensor, scale: float) -> Passed:
        """See :class:`~pronk.train.loop.Objective`.

        The loss is the heads' mean, the gradient that of their sum. The guesses of the heads beside the model's own are
        compared with what the model itself finds likeliest where their token is next.
        """
        inputs, targets = inputs.to(self.device), targets.to(self.device)
        with self._autocast():
            trunk = self._trunk(inputs)
        z = trunk.detach().requires_grad_()
        losses, same, own = list[float](), list[float](), targets.reshape(-1)
        for number, loss, likeliest, said in self._losses(inputs, targets, z):
            (loss * scale).backward()
            losses.append(float(loss.detach()))
            if number:
                same.append(float((likeliest == own[said]).double().mean()))
            else:
                own = likeliest
        trunk.backward(z.grad)
        return Passed(fmean(losses), tuple(same))

    def _losses(self, inputs: Tensor, targets: Tensor, z: Tensor) -> Any:
        """Each head's number, loss and likeliest tokens, and the rows where these are next tokens."""
        batch, length = inputs.shape
        with self._autocast():
            stages = self.module.stages(inputs)
        found = head_by_head(stages, z, chained=self.module.heads.shape.chained)
        while True:
            with self._autocast():
                number, out = next(found, (0, None))
                if out is None:
                    return
                rows, said = ahead(batch, length, number, inputs.device)
                hidden, weight = self.module.scored(number, out[rows])
            loss, likeliest = text_loss(hidden, weight, targets.reshape(-1)[said], self.dtype)
            yield number, loss, likeliest, said

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.dtype == torch.bfloat16)

    @torch.no_grad()
    def measure(self, inputs: Tensor, targets: Tensor) -> list[float]:
        """Mean loss of each head, the model's own first, in nats per token."""
        inputs, targets = inputs.to(self.device), targets.to(self.device)
        with self._autocast():
            z = self._trunk(inputs)
        return [float(loss) for _, loss, _, _ in self._losses(inputs, targets, z)]

    def evaluate(self, length: int, seconds: float = inf) -> dict[str, float]:
        """See :class:`~pronk.train.lm.TextModel`; with alpha, CTAR and S, as the decoding engine measures them."""
        return super().evaluate(length, seconds / 2) | self._serve(seconds / 2)

    def judge(self, figures: Mapping[str, float]) -> float:
        """See :class:`~pronk.train.lm.TextModel`; what the engine measures is no loss."""
        return super().judge({name: value for name, value in figures.items() if not is_served(name)})

    def _serve(self, seconds: float) -> dict[str, float]:
        """What the engine makes of the model and its heads as they are now, in ``RUN/latest``."""
        config, latest = self.config, self.folder / "latest"
        prompts = beginnings(self.data, config.vocab_size, config.eos_ids[0], config.context)
        if not prompts:
            return {}
        self.export(latest, "", {})
        llm = LLM(latest, drafter="autoregressive", device=str(self.device), max_batch=len(prompts), budget="all")
        return measure(llm, f"multi_token(model={str(latest / 'heads')!r})", prompts, SERVED_TOKENS, seconds)

    def export(self, folder: Path, card: str, facts: Mapping[str, Any]) -> None:
        """Replace ``folder`` by the model, and ``folder / "heads"`` by the other heads."""
        super().export(folder, card, facts)
        shape, fingerprint = self.options.heads, Fingerprint.of(folder)
        rest = dict(facts)
        name = rest.pop("name", folder.name)
        target = {"name": name, **asdict(fingerprint)}
        document = {"format": FORMAT, "kind": "multi_token", "shape": asdict(shape), **rest, "target": target}
        text = heads_card(name, describe(shape), str(fingerprint), shape.num_heads, rest)
        export_drafter(folder / "heads", self.module.heads, document, text)
