"""The decoder of :mod:`pronk.models.decoder` as a module of torch, and the loading of its weights.

The input is *packed rows* ``[rows, hidden]``: tokens of any sequences, without a batch dimension.
Rows interact only in the attention, which the caller passes as a function :class:`Attend`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pronk import OptionError
from pronk.base import refuse
from pronk.base.arrays import UINT8, Array, mapped_zeros
from pronk.base.convert import to_tensor
from pronk.checkpoint import (
    CheckpointTensor,
    DecoderPart,
    Inventory,
    MixtureConfig,
    ModelConfig,
    RopeConfig,
    RopeTable,
    open_checkpoint,
    plan_tensors,
    tensor_names,
)
from pronk.train.modules.experts import choose_experts

# Cosines and sines by which RoPE rotates the rows, the arguments of :func:`apply_rope`; ``None``
# without RoPE.
Rope = tuple[Tensor, Tensor] | None

_ANY_NAME = re.compile(".*")

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu2": lambda x: F.relu(x).square(),
}

# Attention over a training batch. The arguments are the index of a layer (from 0), ``q`` ``[rows,
# heads, d]``, and ``k`` and ``v`` ``[rows, kv_heads, d]``; the result is ``[rows, heads * d]``.
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]


class ModuleLayer(nn.Module):
    """Transformer layer on packed rows: attention, then MLP or a ``mixture`` of experts.

    The weights of a new object are uninitialized.
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
        size = config.hidden_size
        self.out = empty_linear(size, config.num_heads * config.head_dim, bias=config.out_bias)
        self.mlp_norm = make_norm(config) if before else nn.Identity()
        self.mlp_output_norm = make_norm(config) if after else nn.Identity()
        width = config.intermediate_size if mixture is None else mixture.width
        up_width = 2 * width if config.gated else width
        self.router: nn.Linear | None = None
        self.up: nn.Linear | nn.ModuleList
        self.down: nn.Linear | nn.ModuleList
        if mixture is None:
            self.up = empty_linear(up_width, size, bias=config.mlp_bias)
            self.down = empty_linear(size, width, bias=config.mlp_bias)
        else:
            self.router = empty_linear(mixture.experts, size, bias=False)
            experts = range(mixture.experts)
            self.up = nn.ModuleList(empty_linear(up_width, size, bias=False) for _ in experts)
            self.down = nn.ModuleList(empty_linear(size, width, bias=False) for _ in experts)
        self.activate = _ACTIVATIONS[config.activation]

    def forward(self, x: Tensor, rope: Rope, index: int, attend: Attend) -> Tensor:
        """Return the output of the layer for ``x`` ``[rows, hidden]``, of the same shape.

        ``index`` is the number of the layer, from 0.
        """
        return self.apply_mlp(self.apply_attention(x, rope, index, attend))

    def apply_attention(self, x: Tensor, rope: Rope, index: int, attend: Attend) -> Tensor:
        """Return ``x`` ``[rows, hidden]`` plus the output of self-attention.

        The other arguments are those of :meth:`forward`.
        """
        q, k, v = self._project(self.attention_norm(x), rope)
        return self._add(x, self.attention_output_norm(self.out(attend(index, q, k, v))))

    def apply_mlp(self, x: Tensor) -> Tensor:
        """Return ``x`` ``[rows, hidden]`` plus the output of the MLP or the mixture of experts."""
        normed = self.mlp_norm(x)
        if self.router is None:
            branch = self._compute_mlp(normed, self.up, self.down)
        else:
            branch = self._mix(normed)
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
        """Return the weighted sum of the outputs of each row's experts, ``[rows, hidden]``.

        The outputs are added in the order of the experts' numbers.
        """
        assert self.mixture is not None
        assert self.router is not None
        assert isinstance(self.up, nn.ModuleList)
        assert isinstance(self.down, nn.ModuleList)
        chosen, shares = choose_experts(self.router(x), self.mixture)
        dtype = torch.promote_types(x.dtype, shares.dtype)
        total = torch.zeros(x.shape, dtype=dtype, device=x.device)
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
        """Return rotated queries ``[rows, heads, head_dim]``, rotated keys, and values.

        Keys and values are ``[rows, kv_heads, head_dim]``. Queries are scaled such that attention,
        which multiplies scores by ``head_dim ** -0.5``, has the scale of the configuration.
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
            q = self.q_norm(qk[:, : config.num_heads])
            k = self.k_norm(qk[:, config.num_heads :])
            qk = torch.cat((q, k), dim=1)
        if rope is not None:
            qk = apply_rope(qk, *rope)
        q = qk[:, : config.num_heads]
        k = qk[:, config.num_heads :]
        if config.attention_scale is not None:
            q = q * (config.attention_scale * config.head_dim**0.5)
        return q, k, v


class DecoderModule(nn.Module):
    """Language model on packed rows; the weights of a new object are uninitialized."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Parameter(torch.empty(config.vocab_size, config.hidden_size))
        # Learned position embeddings ``[context, hidden]``; ``None`` with RoPE.
        self.positions: nn.Parameter | None = None
        if config.rope is None:
            self.positions = nn.Parameter(torch.empty(config.context, config.hidden_size))
        self.layers = nn.ModuleList(
            ModuleLayer(config, config.mixture_of(layer)) for layer in range(config.num_layers)
        )
        self.norm = make_norm(config)
        self.head = empty_linear(config.vocab_size, config.hidden_size, bias=False)
        if config.tied:
            self.head.weight = self.embedding
        self.rotations = {rope: Rotations(rope) for rope in config.ropes}

    def embed(self, tokens: Tensor, positions: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the input of the first layer, ``[rows, hidden]``: embedded tokens and positions.

        ``tokens`` and ``positions`` are ``[rows]``.
        """
        x = F.embedding(tokens, self.embedding)
        if self.positions is not None:
            x = x.to(dtype) + F.embedding(positions, self.positions).to(dtype)
        return x.to(dtype) * torch.tensor(self.config.embedding_scale, dtype=dtype, device=x.device)

    def rope(self, positions: Tensor, dtype: torch.dtype, layer: int = 0) -> Rope:
        """Return RoPE's cosines and sines for rows at ``positions``, in a layer (from 0).

        ``None`` if the layer has no RoPE.
        """
        rope = self.config.rope_of(layer)
        return None if rope is None else self.rotations[rope](positions, dtype)

    def layer_ropes(self, positions: Tensor, dtype: torch.dtype) -> list[Rope]:
        """Return RoPE's cosines and sines for rows at ``positions``, for each layer."""
        made: dict[RopeConfig | None, Rope] = {
            rope: make(positions, dtype) for rope, make in self.rotations.items()
        }
        return [made.get(self.config.rope_of(layer)) for layer in range(len(self.layers))]

    def run(
        self, x: Tensor, ropes: Sequence[Rope], attend: Attend, stop: int | None = None
    ) -> Iterator[tuple[int, Tensor]]:
        """Run layers 1 to ``stop`` (default: all); yield number and output of each layer.

        ``x`` ``[rows, hidden]`` is the input of layer 1; ``ropes`` has the rotations for each
        layer.
        """
        for index in range(len(self.layers) if stop is None else stop):
            x = self.layers[index](x, ropes[index], index, attend)
            yield index + 1, x

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits ``[rows, vocab]`` of outputs ``[rows, hidden]`` of the last layer."""
        return scale_logits(self.head(self.norm(hidden)), self.config)

    def initialize(self, generator: torch.Generator) -> None:
        """Set random weights as GPT-2 does (:func:`initialize_parameters`)."""
        initialize_parameters(self.named_parameters(), generator, self.config.num_layers)


def scale_logits(products: Tensor, config: ModelConfig) -> Tensor:
    """Return the logits of a model whose LM head computed ``products``, of the same shape."""
    logits = products if config.logits_scale == 1.0 else products * config.logits_scale
    cap = config.logits_cap
    return logits if cap is None else cap * torch.tanh(logits / cap)


def initialize_parameters(
    parameters: Iterable[tuple[str, nn.Parameter]],
    generator: torch.Generator,
    num_layers: int | None = None,
) -> None:
    """Initialize parameters as GPT-2 does.

    Matrices are normal, with deviation 0.02, or 0.02 / √(2 · layers) for ``out`` and ``down``.
    Weights of norms are 1, biases are 0.
    """
    shrink = 1.0 if num_layers is None else (2 * num_layers) ** -0.5
    with torch.no_grad():
        for name, parameter in parameters:
            if parameter.dim() == 1:
                parameter.fill_(0.0 if name.endswith("bias") else 1.0)
                continue
            writes_residual = name.endswith(("out.weight", "down.weight"))
            std = 0.02 * (shrink if writes_residual else 1.0)
            parameter.normal_(0.0, std, generator=generator)


def make_norm(config: ModelConfig) -> nn.Module:
    """Return a norm over the hidden size, of the type in ``config``: RMSNorm or LayerNorm."""
    norm = nn.RMSNorm if config.norm == "rms" else nn.LayerNorm
    return norm(config.hidden_size, config.norm_eps)


def empty_linear(out_features: int, in_features: int, *, bias: bool) -> nn.Linear:
    """Return a linear layer with uninitialized weights, on the default device."""
    linear = nn.Linear(in_features, out_features, bias=bias, device="meta")
    return linear.to_empty(device=torch.get_default_device())


class Rotations:
    """Cosines and sines of RoPE for rows at given positions, computed once.

    With *dynamic* scaling, each row is rotated as if it were the last token of its text.
    """

    def __init__(self, config: RopeConfig | None) -> None:
        self._table = RopeTable(config)
        # For each device: cosines and sines of all positions so far, ``[positions, 2, head_dim /
        # 2]``.
        self._entries: dict[torch.device, Tensor] = {}

    def __call__(self, positions: Tensor, dtype: torch.dtype) -> Rope:
        """Return ``cos`` and ``sin`` for :func:`apply_rope`, each ``[rows, 1, head_dim]``.

        The result is ``None`` without RoPE.
        """
        if self._table.config is None:
            return None
        cos, sin = self.look_up(positions).to(dtype)[:, None].unbind(2)
        return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)

    def look_up(self, positions: Tensor) -> Tensor:
        """Return the cosines and sines of the positions, float32 ``[rows, 2, head_dim / 2]``."""
        stop = int(positions.max()) + 1
        device = positions.device
        table = self._table
        if device not in self._entries or len(self._entries[device]) < stop:
            if table.dynamic:
                entries = table.compute_entries(range(stop), range(1, stop + 1))
            else:
                entries = table.up_to(stop)
            self._entries[device] = to_tensor(entries).to(device)
        return self._entries[device][positions]


def maybe_compile(function: Callable[..., Tensor], *, compiles: bool) -> Callable[..., Tensor]:
    """Return ``function``, compiled with ``torch.compile`` if ``compiles`` is set."""
    if not compiles:
        return function
    _keep_tables_out_of_compiled_code()
    return torch.compile(function)


@cache
def _keep_tables_out_of_compiled_code() -> None:
    """Let compiled functions look up rotations as plain Python.

    The tables grow with the positions, so that the compiler would compile the code again and again.
    A decorator at the function would do the same, but every process that imports this module would
    import the compiler, which takes a second.
    """
    Rotations.look_up = torch.compiler.disable(Rotations.look_up)  # type: ignore[method-assign]


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return ``x`` ``[rows, heads, head_dim]`` rotated by RoPE.

    Coordinates ``i`` and ``i + d / 2`` of a head are rotated as a pair. ``cos`` and ``sin`` are
    ``[rows, 1, d]``: the cosines twice, and the sines with negative and with positive sign. If
    ``d`` is below ``head_dim``, only the first ``d`` coordinates are rotated.
    """
    size = cos.shape[-1]
    if size < x.shape[-1]:  # coordinates from ``size`` on are not rotated
        return torch.cat((apply_rope(x[..., :size], cos, sin), x[..., size:]), dim=-1)
    half = size // 2
    swapped = torch.cat((x[..., half:], x[..., :half]), dim=-1)
    return torch.addcmul(x * cos, swapped, sin)


def _check_supported(folder: Path, config: ModelConfig) -> None:
    """Raise an OptionError if the module does not compute what the config asks for."""
    if config.query_growth is not None:
        msg = (
            f"{folder}: expected a model whose queries have one scale at all positions, found "
            f"{config.family}"
        )
        raise OptionError(msg)
    for kind, other in (
        ("short convolutions", config.convolution),
        ("recurrent layers", config.recurrent),
        ("latent attention", config.latent),
        ("attention of different shapes", config.attention_shapes or None),
    ):
        if other is not None:
            msg = (
                f"{folder}: expected a model with equal attention in all layers, found "
                f"{config.family} with {kind}; train eagle3, or use a drafter without training, "
                "such as suffix"
            )
            raise OptionError(msg)
    mixture = config.mixture
    if mixture is not None and (mixture.shared_width or mixture.correction):
        expected = "expected experts without a shared one and without a correction of the choice"
        found = f"found {config.family}; use a drafter without training, such as a draft model"
        refuse(folder, f"{expected}, {found}", OptionError)
    if config.attention_sinks:
        refuse(
            folder, f"expected a model without attention sinks, found {config.family}", OptionError
        )


def load_module(
    folder: Path, config: ModelConfig, dtype: torch.dtype, device: torch.device
) -> DecoderModule:
    """Return a frozen module with the dequantized weights of a model folder or GGUF file.

    Raises:
        OptionError: the model scales queries by position, has attention sinks, short convolutions,
            recurrent layers, or experts with a shared one or a correction of the router's choice,
            which the module does not compute.
        CheckpointError: tensors are missing, unexpected, damaged, or of a wrong shape or dtype.
    """
    _check_supported(folder, config)
    checkpoint = open_checkpoint(folder)
    parts = list(plan_tensors(config, tensor_names(checkpoint, config)))
    return _load_parts(Inventory(checkpoint, config, parts), parts, config, dtype, device)


def load_ends(
    folder: Path, config: ModelConfig, dtype: torch.dtype, device: torch.device
) -> DecoderModule:
    """Return a frozen module without layers: embedding, final norm and LM head, dequantized.

    Layers of every kind are left out, also those that :func:`load_module` refuses. The arguments
    are those of :func:`load_module`. Raises ``CheckpointError`` as it does.
    """
    checkpoint = open_checkpoint(folder)
    names = replace(tensor_names(checkpoint, config), ignored=_ANY_NAME)
    ends = config.layers_like(0, 0)
    parts = list(plan_tensors(ends, names))
    return _load_parts(Inventory(checkpoint, ends, parts, names), parts, ends, dtype, device)


def _load_parts(
    inventory: Inventory,
    parts: Sequence[DecoderPart],
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
) -> DecoderModule:
    """Return a frozen module with the weights of ``parts``."""
    with torch.device("meta"):
        module = DecoderModule(config)
    for part in parts:
        for key, sources in (("weight", part.weight), ("bias", part.bias)):
            if not sources:
                continue
            full_name = part.target if part.kind == "table" else f"{part.target}.{key}"
            path, _, name = full_name.rpartition(".")
            arrays = [_read(inventory, source, transposed=part.transposed) for source in sources]
            if part.kind == "norm" and key == "weight" and config.norm_offset:
                offset = np.float32(config.norm_offset)
                arrays = [array.astype(np.float32) + offset for array in arrays]
            values = nn.Parameter(_concatenate(arrays, dtype, device), requires_grad=False)
            setattr(module.get_submodule(path), name, values)
        inventory.checkpoint.release()
    if config.tied:
        module.head.weight = module.embedding
    return module.requires_grad_(requires_grad=False).eval()


def _read(inventory: Inventory, source: CheckpointTensor, *, transposed: bool) -> Array:
    """Return a tensor of the checkpoint, dequantized; a matrix is ``[outputs, inputs]``.

    ``transposed``: the checkpoint stores the matrix as ``[inputs, outputs]``.
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
    """Convert arrays, one by one, to a tensor of all their rows, to save peak memory."""
    rows = [len(array) for array in arrays]
    values = torch.empty(sum(rows), *arrays[0].shape[1:], dtype=dtype, device=device)
    for target, array in zip(values.split(rows), arrays, strict=True):
        target.copy_(to_tensor(array))
    return values
