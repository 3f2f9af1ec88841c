"""The decoder of :mod:`pronk.models.decoder` as a module of torch, for training; its loading.

The input is *packed rows* ``[rows, hidden]``: tokens of any sequences, without a batch dimension.
Only the attention, which the caller passes as :class:`Attend`, lets rows interact.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pronk import OptionError
from pronk.base import refuse
from pronk.base.arrays import UINT8, Array, mapped_zeros
from pronk.checkpoint import (
    CheckpointTensor,
    Inventory,
    MixtureConfig,
    ModelConfig,
    RopeConfig,
    RopeTable,
    open_checkpoint,
    plan_tensors,
    tensor_names,
)
from pronk.torch import ACTIVATIONS, choose_experts, to_tensor

# Rotations of rows: arguments of :func:`apply_rope`; ``None``: no RoPE.
Rope = tuple[Tensor, Tensor] | None


# Attention over a training batch: maps the number of a layer, ``q`` ``[rows, heads, d]``, ``k`` and
# ``v`` ``[rows, kv_heads, d]`` to ``[rows, heads * d]``.
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]


class ModuleLayer(nn.Module):
    """Transformer layer on packed rows: attention, then MLP or a ``mixture`` of experts.

    Uninitialized.
    """

    def __init__(self, config: ModelConfig, mixture: MixtureConfig | None = None) -> None:
        super().__init__()
        self.config = config
        self.mixture = mixture
        before = config.norm_places != "output"
        after = config.norm_places != "input"
        self.attention_norm = make_norm(config) if before else nn.Identity()
        self.attention_output_norm = make_norm(config) if after else nn.Identity()
        self.qkv = empty_linear(sum(config.qkv_sizes), config.hidden_size, bias=config.qkv_bias)
        queries, keys, _ = config.qkv_sizes if config.whole_qk_norm else (config.head_dim,) * 3
        self.q_norm = nn.RMSNorm(queries, config.norm_eps) if config.qk_norm else None
        self.k_norm = nn.RMSNorm(keys, config.norm_eps) if config.qk_norm else None
        self.out = empty_linear(
            config.hidden_size, config.num_heads * config.head_dim, bias=config.out_bias
        )
        self.mlp_norm = make_norm(config) if before else nn.Identity()
        self.mlp_output_norm = make_norm(config) if after else nn.Identity()
        width = config.intermediate_size if mixture is None else mixture.width
        sizes = (
            (width * (2 if config.gated else 1), config.hidden_size),
            (config.hidden_size, width),
        )
        self.router = (
            None
            if mixture is None
            else empty_linear(mixture.experts, config.hidden_size, bias=False)
        )
        self.up, self.down = (
            empty_linear(*size, bias=config.mlp_bias)
            if mixture is None
            else nn.ModuleList(empty_linear(*size, bias=False) for _ in range(mixture.experts))
            for size in sizes
        )
        self.activate = ACTIVATIONS[config.activation]

    def forward(self, x: Tensor, rope: Rope, index: int, attend: Attend) -> Tensor:
        """Map ``x`` ``[rows, hidden]`` to the same shape.

        ``index`` is the number of the layer, from 0.
        """
        return self.apply_mlp(self.apply_attention(x, rope, index, attend))

    def apply_attention(self, x: Tensor, rope: Rope, index: int, attend: Attend) -> Tensor:
        """Return ``x`` plus its self-attention; the arguments are those of :meth:`forward`."""
        q, k, v = self._project(self.attention_norm(x), rope)
        return self._add(x, self.attention_output_norm(self.out(attend(index, q, k, v))))

    def apply_mlp(self, x: Tensor) -> Tensor:
        """Return ``x`` ``[rows, hidden]`` plus its MLP."""
        normed = self.mlp_norm(x)
        branch = (
            self._compute_mlp(normed, self.up, self.down)
            if self.router is None
            else self._mix(normed)
        )
        return self._add(x, self.mlp_output_norm(branch))

    def _compute_mlp(
        self, x: Tensor, up: Callable[[Tensor], Tensor], down: Callable[[Tensor], Tensor]
    ) -> Tensor:
        hidden = up(x)
        if self.config.gated:
            gate, hidden = hidden.chunk(2, dim=-1)
            return down(self.activate(gate) * hidden)
        return down(self.activate(hidden))

    def _mix(self, x: Tensor) -> Tensor:
        """Return the weighted sum of the outputs of each row's experts, in their order."""
        assert self.mixture is not None
        assert self.router is not None
        assert isinstance(self.up, nn.ModuleList)
        assert isinstance(self.down, nn.ModuleList)
        chosen, shares = choose_experts(self.router(x), self.mixture)
        total = torch.zeros(
            x.shape, dtype=torch.promote_types(x.dtype, shares.dtype), device=x.device
        )
        for number, (up, down) in enumerate(zip(self.up, self.down, strict=True)):
            rows, ranks = (chosen == number).nonzero(as_tuple=True)
            if len(rows):
                output = self._compute_mlp(x[rows], up, down) * shares[rows, ranks, None]
                total = total.index_add(0, rows, output)
        return total.to(x.dtype)

    def _add(self, x: Tensor, branch: Tensor) -> Tensor:
        scale = self.config.residual_scale
        return x + branch if scale == 1.0 else x + scale * branch

    def _project(self, x: Tensor, rope: Rope) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries and keys, both rotated, and values: each ``[rows, heads or kv_heads, head_dim]``.

        Queries are scaled so that attention with scores times ``head_dim ** -0.5`` is that of the
        configuration.
        """
        config = self.config
        projected = self.qkv(x)
        if config.whole_qk_norm and self.q_norm is not None and self.k_norm is not None:
            q, k, v = projected.split(config.qkv_sizes, dim=-1)
            projected = torch.cat((self.q_norm(q), self.k_norm(k), v), dim=-1)
        num_qk = config.num_heads + config.num_kv_heads
        heads = projected.view(x.shape[0], num_qk + config.num_kv_heads, config.head_dim)
        qk = heads[:, :num_qk]
        v = heads[:, num_qk:]
        if not config.whole_qk_norm and self.q_norm is not None and self.k_norm is not None:
            qk = torch.cat(
                (self.q_norm(qk[:, : config.num_heads]), self.k_norm(qk[:, config.num_heads :])),
                dim=1,
            )
        if rope is not None:
            qk = apply_rope(qk, *rope)
        q = qk[:, : config.num_heads]
        k = qk[:, config.num_heads :]
        return (
            q
            if config.attention_scale is None
            else q * (config.attention_scale * config.head_dim**0.5),
            k,
            v,
        )


class DecoderModule(nn.Module):
    """Language model on packed rows; the weights of a new object are uninitialized."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Parameter(torch.empty(config.vocab_size, config.hidden_size))
        learned = config.rope is None
        # Learned position embeddings ``[context, hidden]``; ``None`` with RoPE.
        self.positions = (
            nn.Parameter(torch.empty(config.context, config.hidden_size)) if learned else None
        )
        self.layers = nn.ModuleList(
            ModuleLayer(config, config.mixture_of(layer)) for layer in range(config.num_layers)
        )
        self.norm = make_norm(config)
        self.head = empty_linear(config.vocab_size, config.hidden_size, bias=False)
        if config.tied:
            self.head.weight = self.embedding
        self.rotations = {rope: Rotations(rope) for rope in config.ropes}

    def embed(self, tokens: Tensor, positions: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the input of layer 0, ``[rows, hidden]``, for token ids and positions ``[rows]``."""
        x = F.embedding(tokens, self.embedding)
        if self.positions is not None:
            x = x.to(dtype) + F.embedding(positions, self.positions).to(dtype)
        return x.to(dtype) * torch.tensor(self.config.embedding_scale, dtype=dtype, device=x.device)

    def rope(self, positions: Tensor, dtype: torch.dtype, layer: int = 0) -> Rope:
        """Return the rotations of the rows in a layer (from 0); see :class:`Rotations`."""
        rope = self.config.rope_of(layer)
        return None if rope is None else self.rotations[rope](positions, dtype)

    def layer_ropes(self, positions: Tensor, dtype: torch.dtype) -> list[Rope]:
        made: dict[RopeConfig | None, Rope] = {
            rope: make(positions, dtype) for rope, make in self.rotations.items()
        }
        return [made.get(self.config.rope_of(layer)) for layer in range(len(self.layers))]

    def run(
        self, x: Tensor, ropes: Sequence[Rope], attend: Attend, stop: int | None = None
    ) -> Iterator[tuple[int, Tensor]]:
        """Run layers ``0 .. stop - 1``, with the rotations of each.

        Yield its number (from 1) and its output.
        """
        for index in range(len(self.layers) if stop is None else stop):
            x = self.layers[index](x, ropes[index], index, attend)
            yield index + 1, x

    def logits(self, hidden: Tensor) -> Tensor:
        """Apply the final norm and the head: ``[rows, hidden]`` to ``[rows, vocab]``."""
        logits = self.head(self.norm(hidden))
        logits = logits if self.config.logits_scale == 1.0 else logits * self.config.logits_scale
        cap = self.config.logits_cap
        return logits if cap is None else cap * torch.tanh(logits / cap)

    def initialize(self, generator: torch.Generator) -> None:
        initialize_parameters(self.named_parameters(), generator, self.config.num_layers)


def initialize_parameters(
    parameters: Iterable[tuple[str, nn.Parameter]],
    generator: torch.Generator,
    num_layers: int | None = None,
) -> None:
    """Initialize as GPT-2: normal, with deviation 0.02, or 0.02 / √(2 · layers) for ``out`` and ``down``."""
    shrink = 1.0 if num_layers is None else (2 * num_layers) ** -0.5
    with torch.no_grad():
        for name, parameter in parameters:
            if parameter.dim() == 1:
                parameter.fill_(0.0 if name.endswith("bias") else 1.0)
            else:
                std = 0.02 * (shrink if name.endswith(("out.weight", "down.weight")) else 1.0)
                parameter.normal_(0.0, std, generator=generator)


def make_norm(config: ModelConfig) -> nn.Module:
    """Return a norm layer of the model's type over its hidden size."""
    norm = nn.RMSNorm if config.norm == "rms" else nn.LayerNorm
    return norm(config.hidden_size, config.norm_eps)


def empty_linear(out_features: int, in_features: int, *, bias: bool) -> nn.Linear:
    """Return a linear layer with uninitialized weights, on the default device."""
    return nn.Linear(in_features, out_features, bias=bias, device="meta").to_empty(
        device=torch.get_default_device()
    )


class Rotations:
    """Rotations of RoPE for rows at given positions.

    With *dynamic* scaling, of each text's last token.
    """

    def __init__(self, config: RopeConfig | None) -> None:
        self._table = RopeTable(config)
        # entry ``i``: cosines and sines of position ``i``
        self._entries: dict[torch.device, Tensor] = {}

    def __call__(self, positions: Tensor, dtype: torch.dtype) -> Rope:
        """Return ``cos`` and ``sin`` for :func:`apply_rope`, ``[rows, 1, head_dim]``.

        ``None`` without RoPE.
        """
        if self._table.config is None:
            return None
        cos, sin = self._look_up(positions).to(dtype)[:, None].unbind(2)
        return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _look_up(self, positions: Tensor) -> Tensor:
        """Return the cosines and sines of the positions, float32 ``[rows, 2, head_dim / 2]``."""
        stop = int(positions.max()) + 1
        device = positions.device
        table = self._table
        if device not in self._entries or len(self._entries[device]) < stop:
            entries = (
                table.compute_entries(range(stop), range(1, stop + 1))
                if table.dynamic
                else table.up_to(stop)
            )
            self._entries[device] = to_tensor(entries).to(device)
        return self._entries[device][positions]


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate each pair of coordinates ``i`` and ``i + head_dim / 2`` of ``x`` ``[rows, heads, head_dim]``.

    ``cos`` is ``(cos, cos)`` and ``sin`` is ``(-sin, sin)``, each ``[rows, 1, head_dim]``.
    """
    size = cos.shape[-1]
    if size < x.shape[-1]:  # the other coordinates are not rotated
        return torch.cat((apply_rope(x[..., :size], cos, sin), x[..., size:]), dim=-1)
    half = size // 2
    swapped = torch.cat((x[..., half:], x[..., :half]), dim=-1)
    return torch.addcmul(x * cos, swapped, sin)


def load_module(
    folder: Path, config: ModelConfig, dtype: torch.dtype, device: torch.device
) -> DecoderModule:
    """Return a frozen module with the weights of a model folder or GGUF file, which are dequantized.

    Raises:
        OptionError: the model scales queries by position, has attention sinks or short
            convolutions, which the module does not compute.
        CheckpointError: tensors are missing, unexpected, damaged, or of a wrong shape or dtype.
    """
    if config.query_growth is not None:
        msg = (
            f"{folder}: expected a model whose queries have one scale at all positions, found "
            f"{config.family}"
        )
        raise OptionError(msg)
    if config.convolution is not None:
        msg = (
            f"{folder}: expected a model with attention in all layers, found {config.family} with "
            "short convolutions; "
            "use a drafter without training, such as prompt_lookup or a draft model"
        )
        raise OptionError(msg)
    if config.attention_sinks:
        refuse(
            folder, f"expected a model without attention sinks, found {config.family}", OptionError
        )
    checkpoint = open_checkpoint(folder)
    parts = list(plan_tensors(config, tensor_names(checkpoint, config)))
    inventory = Inventory(checkpoint, config, parts)
    with torch.device("meta"):
        module = DecoderModule(config)
    for part in parts:
        for key, sources in (("weight", part.weight), ("bias", part.bias)):
            if sources:
                path, _, name = (
                    part.target if part.kind == "table" else f"{part.target}.{key}"
                ).rpartition(".")
                arrays = [
                    _read(inventory, source, transposed=part.transposed) for source in sources
                ]
                if part.kind == "norm" and key == "weight" and config.norm_offset:
                    arrays = [
                        array.astype(np.float32) + np.float32(config.norm_offset)
                        for array in arrays
                    ]
                values = nn.Parameter(_concatenate(arrays, dtype, device), requires_grad=False)
                setattr(module.get_submodule(path), name, values)
        checkpoint.release()
    if config.tied:
        module.head.weight = module.embedding
    return module.requires_grad_(requires_grad=False).eval()


def _read(inventory: Inventory, source: CheckpointTensor, *, transposed: bool) -> Array:
    """Read a tensor.

    Matrices that the checkpoint stores as ``[inputs, outputs]`` are transposed.
    """
    if not inventory.is_quantized(source):
        values = inventory.tensor(source)
        return values.T if transposed else values
    shape = source.shape[::-1] if transposed else source.shape
    weight = inventory.weight(source, mapped_zeros(shape, UINT8))
    if not isinstance(weight, np.ndarray):
        return weight.dequantize()
    return weight.T if transposed else weight


def _concatenate(arrays: Sequence[Array], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Convert arrays, one by one, to a tensor of all their rows."""
    rows = [len(array) for array in arrays]
    values = torch.empty(sum(rows), *arrays[0].shape[1:], dtype=dtype, device=device)
    for target, array in zip(values.split(rows), arrays, strict=True):
        target.copy_(to_tensor(array))
    return values
