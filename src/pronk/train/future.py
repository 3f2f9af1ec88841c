"""Training of a language model that predicts several tokens at once (Gloeckle et al. 2024).

The loss is equation 2 over ``n`` heads. Head ``i`` predicts the token ``i`` positions further on;
head 1 is the model's own. For each head, the sum over rows is replaced by the mean over the rows
``t`` whose sequence has a token ``t + i``::

    L = - Σ_t Σ_(i=1..n) log P(x[t+i] | x[..t])

The export is an ordinary checkpoint, whose own head predicts the next token. The other heads are in
its folder ``heads``, for the drafter ``multi_token``.

The layers below all heads are the *trunk*. In a model with ``L`` layers, the trunk ends with the
following layer, for transformer heads in three orders and for linear heads::

    parallel       layer L - 1; layer L is head 1
    causal         layer L; head 1 is the final norm and the unembedding alone
    anticausal     layer L - n; the last n layers are the heads, head n first
    linear         layer L; head 1 is the final norm and the unembedding alone
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from math import inf
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn

from pronk import LLM, OptionError
from pronk.base import refuse
from pronk.base.checks import check_choice, check_integer
from pronk.checkpoint import Fingerprint, ModelConfig
from pronk.lab import HEAD_LAYERS, HEAD_ORDERS, TRAINED_FORMAT, HeadsShape
from pronk.train.attention import DenseAttention, dense_hidden, dense_rope
from pronk.train.card import heads_card
from pronk.train.export import InitialModel, export_drafter
from pronk.train.heads import Stage, head_by_head, head_stages, head_weight, shifted_rows
from pronk.train.lm import TextModel
from pronk.train.loop import PassResult
from pronk.train.losses import autocast, text_loss
from pronk.train.modules.decoder import DecoderModule, maybe_compile
from pronk.train.modules.drafters import HeadsModule
from pronk.train.options import ModelShape
from pronk.train.served import SERVED_TOKENS, beginnings, is_served, measure


def future_shape(
    model: ModelShape, tokens: int, kind: str, order: str, unembeddings: str, mlp: int | None = None
) -> HeadsShape | None:
    """Return the shape of the heads besides the model's own; ``None`` if ``tokens`` is 1.

    The model predicts ``tokens`` tokens at a time. ``kind``, ``order``, ``unembeddings`` and
    ``mlp`` are those of :class:`~pronk.lab.drafters.modules.heads.HeadsShape`; the default ``mlp``
    is the model's. Raises OptionError if a value is out of range, if the model has too few layers,
    or if the heads cannot be layers of the model.
    """
    if tokens == 1:
        return None
    check_integer("future-tokens", tokens, 1, 64)
    check_choice("head-kind", kind, HEAD_LAYERS)
    check_choice("head-order", order, HEAD_ORDERS)
    width = check_integer("head-mlp", model.mlp if mlp is None else mlp, 1)
    inside = 0  # number of the model's own layers that are heads
    if kind == "transformer":
        inside = {"parallel": 1, "causal": 0, "anticausal": tokens}[order]
    if order == "anticausal" and kind != "transformer":
        refuse(
            "head-order",
            f"expected parallel or causal for {kind} heads, found {order}",
            OptionError,
        )
    if order == "anticausal" and width != model.mlp:
        msg = (
            f"head-mlp: expected {model.mlp} for anticausal heads, the last layers of the model, "
            f"found {width}"
        )
        raise OptionError(msg)
    if model.layers <= inside:
        msg = (
            f"layers: expected more than {inside} for {order} heads of {tokens} tokens, found "
            f"{model.layers}"
        )
        raise OptionError(msg)
    return HeadsShape(tokens - 1, model.layers - inside, width, kind, order, unembeddings)


def without_head_layers(model: ModelShape, tokens: int, kind: str, order: str) -> ModelShape:
    """Return ``model`` with one layer less for each further head, which has a layer of its own.

    With heads for ``tokens`` tokens, the shorter model then has as many weights as ``model``,
    except for the norm of each further head (table S4, "+Layers 0"; section 3). Raises
    OptionError if the heads add no transformer layers, or if the model has too few layers.
    """
    if kind != "transformer" or order == "anticausal":
        found = "anticausal" if order == "anticausal" else kind
        msg = (
            "equal-parameters: expected parallel or causal transformer heads, which add layers; "
            f"found {found} heads"
        )
        raise OptionError(msg)
    least = tokens - 1 + (2 if order == "parallel" else 1)
    if model.layers < least:
        msg = (
            f"layers: expected at least {least} to remove {tokens - 1} with --equal-parameters, "
            f"found {model.layers}"
        )
        raise OptionError(msg)
    return replace(model, layers=model.layers - (tokens - 1))


class FutureModel(nn.Module):
    """A decoder, and heads that predict further tokens.

    In the order ``"anticausal"``, the head for the most distant token comes first, and the heads
    are the last layers of the decoder itself. In the other orders they are additional layers.
    """

    def __init__(self, config: ModelConfig, shape: HeadsShape) -> None:
        super().__init__()
        self.decoder = DecoderModule(config)
        inner: list[nn.Module] | None = None
        if shape.order == "anticausal":
            inner = list(self.decoder.layers)[shape.layer : -1]
            inner.reverse()
        self.heads = HeadsModule(shape, config, inner)

    def initialize(self, seed: int, initial: InitialModel | None = None) -> None:
        """Initialize the weights at random, or copy those of the checkpoint ``initial``.

        For a given ``seed``, the decoder's weights are the same with and without heads.
        """
        generator = torch.Generator().manual_seed(seed + 1)
        if initial is None:
            self.heads.initialize(generator)
            self.decoder.initialize(torch.Generator().manual_seed(seed))
            return
        weights = initial.weights()
        self.decoder.load_state_dict(weights)
        self.heads.initialize(
            generator, self.decoder.norm, self.decoder.head.get_parameter("weight")
        )
        # If heads are layers of the decoder, initializing the heads has changed these layers.
        self.decoder.load_state_dict(weights)
        initial.load_heads(self.heads)

    def trunk(self, tokens: Tensor) -> Tensor:
        """Return the trunk's output ``[batch * length, hidden]`` of ``tokens [batch, length]``."""
        return dense_hidden(self.decoder, tokens, stop=self.heads.shape.layer)

    def stages(self, tokens: Tensor) -> list[Stage]:
        """Return number and function of each head, in the order in which the heads run.

        Head 0 is the model's own.
        """
        batch, length = tokens.shape
        rope = dense_rope(self.decoder, batch, length, torch.float32, tokens.device)
        attend = DenseAttention(batch, length)
        shape = self.heads.shape
        last = len(self.decoder.layers) - 1
        further = head_stages(self.heads, rope, attend)
        stages: list[Stage] = [(index + 1, apply) for index, apply in further]

        def own_head(x: Tensor) -> Tensor:
            if shape.layer > last:  # all layers of the model are below the heads
                return x
            out: Tensor = self.decoder.layers[last](x, rope, last, attend)
            return out

        if shape.order == "anticausal":
            return [*stages, (0, own_head)]
        return [(0, own_head), *stages]

    def norm_and_unembedding(self, number: int, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return ``x`` after a head's norm, and the head's unembedding ``[vocab, hidden]``.

        ``number`` is that of the head; head 0 is the model's own.
        """
        unembedding = self.decoder.head.get_parameter("weight")
        if not number:
            return self.decoder.norm(x), unembedding
        return self.heads.norms[number - 1](x), head_weight(self.heads, number - 1, unembedding)


class FutureTokens(TextModel[FutureModel]):
    """Training of a language model with heads that predict further tokens (``options.heads``).

    To save memory, each head runs forward and backward before the next one.
    """

    def build(self) -> FutureModel:
        model = FutureModel(self.config, self.options.heads)
        model.initialize(self.options.seed, self.initial)
        self._trunk = maybe_compile(model.trunk, compiles=self.options.compile)
        return model

    @property
    def decoder(self) -> DecoderModule:
        return self.module.decoder

    def backward(self, inputs: Tensor, targets: Tensor, scale: float) -> PassResult:
        """Add ``scale`` times the gradient of the sum of the heads' losses; return their mean.

        ``same`` of the result has, for each head other than the model's own, the fraction of rows
        in which this head and the model's own head predict the same token as the most likely one.
        """
        inputs = inputs.to(self.device)
        targets = targets.to(self.device)
        with autocast(self.device):
            trunk = self._trunk(inputs)
        z = trunk.detach().requires_grad_()
        losses = list[float]()
        same = list[float]()
        own_tokens = targets.reshape(-1)
        for number, loss, likeliest, own_rows in self._losses(inputs, targets, z):
            (loss * scale).backward()
            losses.append(float(loss.detach()))
            if number:
                same.append(float((likeliest == own_tokens[own_rows]).double().mean()))
            else:
                own_tokens = likeliest
        trunk.backward(z.grad)
        return PassResult(fmean(losses), tuple(same))

    def _losses(self, inputs: Tensor, targets: Tensor, z: Tensor) -> Any:
        """Yield (number, loss, likeliest tokens, rows) of each head.

        ``inputs`` and ``targets`` are ``[batch, length]``, and ``z`` is the output of the trunk.
        Head ``n`` predicts the token ``n`` positions after that of head 0. Therefore ``rows`` are,
        for each of its predictions, the row in which head 0 predicts the same token.
        """
        batch, length = inputs.shape
        with autocast(self.device):
            stages = self.module.stages(inputs)
        outputs = head_by_head(stages, z, chained=self.module.heads.shape.is_chained)
        while True:
            with autocast(self.device):
                number, out = next(outputs, (0, None))
                if out is None:
                    return
                rows, own_rows = shifted_rows(batch, length, number, inputs.device)
                hidden, weight = self.module.norm_and_unembedding(number, out[rows])
            loss, likeliest = text_loss(hidden, weight, targets.reshape(-1)[own_rows])
            yield number, loss, likeliest, own_rows

    @torch.no_grad()
    def measure(self, inputs: Tensor, targets: Tensor) -> list[float]:
        inputs = inputs.to(self.device)
        targets = targets.to(self.device)
        with autocast(self.device):
            z = self._trunk(inputs)
        return [float(loss) for _, loss, _, _ in self._losses(inputs, targets, z)]

    def evaluate(self, length: int, seconds: float = inf) -> dict[str, float]:
        """Return the losses on held-out text; and acceptance rate, CTAR and S in the engine.

        Each of the two measurements takes about ``seconds / 2``. For the engine, the current
        weights are exported to ``RUN/latest``.
        """
        config = self.config
        latest = self.folder / "latest"
        figures = super().evaluate(length, seconds / 2)
        prompts = beginnings(self.data, config.vocab_size, self.end_id, config.context)
        if not prompts:
            return figures
        self.export(latest, "", {})
        llm = LLM(
            latest,
            drafter="autoregressive",
            device=str(self.device),
            max_batch=len(prompts),
            budget="all",
        )
        drafter = f"multi_token(model={str(latest / 'heads')!r})"
        return figures | measure(llm, drafter, prompts, SERVED_TOKENS, seconds / 2)

    def judge(self, figures: Mapping[str, float]) -> float:
        losses = {name: value for name, value in figures.items() if not is_served(name)}
        return super().judge(losses)

    def export(self, folder: Path, card: str, facts: Mapping[str, Any]) -> None:
        """Write the model to ``folder``, and the heads to ``folder / "heads"``.

        The contents of ``folder`` are replaced.
        """
        super().export(folder, card, facts)
        shape = self.options.heads
        fingerprint = Fingerprint.of(folder)
        rest = {"name": folder.name, **facts}
        target = {"name": rest.pop("name"), **asdict(fingerprint)}
        document = {
            "format": TRAINED_FORMAT,
            "kind": "multi_token",
            "shape": asdict(shape),
            **rest,
            "target": target,
        }
        text = heads_card(target["name"], shape, fingerprint, rest)
        export_drafter(folder / "heads", self.module.heads, document, text)
