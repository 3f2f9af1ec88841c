"""Reference model in torch: slow code that follows the formulas, for comparisons.

One text is computed in one pass without a KV cache. The model shares no code with pronk except the
tables of RoPE.
"""

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pronk.base.arrays import BFLOAT16, FLOAT32, Array, DType
from pronk.checkpoint.config import MixtureConfig, ModelConfig
from pronk.checkpoint.rope import RopeConfig, RopeTable

# Cosines and sines ``[rows, 1, size / 2]`` of each row; ``None`` without RoPE.
Rotations = tuple[Tensor, Tensor] | None
# Maps the number of a layer, ``q`` ``[rows, heads, d]``, ``k`` and ``v`` ``[rows, kv_heads, d]`` to
# ``[rows, heads * d]``.
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
# Maps keys or values ``[rows, kv_heads, d]`` to the numbers that a quantized cache has of them.
Rounding = Callable[[Tensor], Tensor]

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu2": lambda x: x.clamp(min=0.0) ** 2,
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
}


def torch_dtype(dtype: DType) -> torch.dtype:
    """Return the type of the same name in torch."""
    found: torch.dtype = getattr(torch, dtype.name)
    return found


def to_tensor(array: Array) -> Tensor:
    """Return a copy of an array as a tensor.

    torch does not know the bfloat16 of ml_dtypes, so the bits are passed as integers.
    """
    if array.dtype != BFLOAT16:
        return torch.from_numpy(array.copy())
    return torch.from_numpy(array.view(np.int16).copy()).view(torch.bfloat16)


def to_array(tensor: Tensor) -> Array:
    """Return a tensor as an array with the same memory."""
    values = tensor.detach()
    if values.dtype != torch.bfloat16:
        return values.numpy()
    return values.view(torch.int16).numpy().view(BFLOAT16)


class DenseAttend:
    """Causal attention over all positions of one text by matrix products, in float32 or wider."""

    def __init__(self, config: ModelConfig, rounding: Rounding | None = None) -> None:
        """Apply ``rounding`` to keys and values, as a quantized KV cache does."""
        self.config = config
        self.rounding = rounding

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        c = self.config
        rows = q.shape[0]
        if self.rounding is not None:
            k, v = (self.rounding(x) for x in (k, v))
        wide = torch.promote_types(q.dtype, torch.float32)
        query, key, value = (x.to(wide).transpose(0, 1) for x in (q, k, v))
        key, value = (x.repeat_interleave(c.group, dim=0) for x in (key, value))
        scale = c.head_dim**-0.5 if c.attention_scale is None else c.attention_scale
        scores = query @ key.transpose(1, 2) * scale
        if c.attention_cap is not None:
            scores = c.attention_cap * torch.tanh(scores / c.attention_cap)
        scores = scores.masked_fill(~visible(rows, c.windows[layer]), -torch.inf)
        mixed = torch.softmax(scores, dim=-1) @ value
        return mixed.transpose(0, 1).reshape(rows, -1).to(q.dtype)


def round_to_8_bits(rows: Tensor) -> Tensor:
    """Round ``[rows, heads, size]`` to multiples of 1/127 of each head's largest magnitude."""
    step = rows.abs().amax(-1, keepdim=True).clamp_min(1e-30) / 127
    return torch.round(rows / step) * step


# Numbers of the codes of an int4 cache: those of IQ4_NL in llama.cpp.
INT4_NUMBERS = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


def hadamard(size: int) -> Array:
    """Return the matrix of Walsh and Hadamard for a power of two, float64 ``[size, size]``."""
    ones = [[(row & column).bit_count() for column in range(size)] for row in range(size)]
    return np.where(np.array(ones) % 2, -1.0, 1.0)


def int4_numbers(rows: Array, value_dim: int = 0) -> Array:
    """Return ``rows`` ``[…, size]`` as an int4 cache stores them and attention reads them, float64.

    With latent attention, the first ``value_dim`` elements of a row are the value.
    """
    size = rows.shape[-1]
    block = math.gcd(size, value_dim, 1 << 10)
    blocks = rows.astype(np.float64).reshape(*rows.shape[:-1], -1, block)
    rotated = (blocks @ hadamard(block) / block).reshape(rows.shape)
    stored = np.empty_like(rotated)
    for first in range(0, size, 32):
        group = rotated[..., first : first + 32]
        extreme = np.take_along_axis(group, np.abs(group).argmax(-1, keepdims=True), axis=-1)
        scale = (extreme / -127).astype(np.float32).astype(BFLOAT16).astype(np.float64)
        scale = np.where(scale == 0, 1.0, scale)
        distances = np.abs((group / scale)[..., None] - np.array(INT4_NUMBERS))
        stored[..., first : first + 32] = scale * np.array(INT4_NUMBERS)[distances.argmin(-1)]
    blocks = stored.reshape(*rows.shape[:-1], -1, block)
    return (blocks @ hadamard(block)).reshape(rows.shape)


def round_to_4_bits(rows: Tensor) -> Tensor:
    """Round ``[rows, heads, size]`` as an int4 cache does."""
    return torch.from_numpy(int4_numbers(rows.double().numpy())).to(rows.dtype)


def visible(rows: int, window: int | None) -> Tensor:
    """Return the causal mask ``[rows, rows]``.

    Row ``i`` attends to row ``j`` if ``0 <= i - j < window``.
    """
    distance = torch.arange(rows)[:, None] - torch.arange(rows)[None, :]
    return (distance >= 0) & (distance < (rows if window is None else window))


def rotate(x: Tensor, rotations: Rotations) -> Tensor:
    """Rotate the pairs of coordinates ``i`` and ``i + size / 2`` of heads ``[rows, heads, d]``.

    Coordinates from ``size`` on are unchanged.
    """
    if rotations is None:
        return x
    cos, sin = rotations
    first, second, rest = x.tensor_split((cos.shape[-1], 2 * cos.shape[-1]), dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1)


def dense_rotations(rope: RopeConfig | None, length: int, dtype: torch.dtype) -> Rotations:
    """Return the rotations of a text, in which *dynamic* scaling depends on the text's length."""
    if rope is None:
        return None
    entries = to_tensor(RopeTable(rope).compute_entries(range(length), [length] * length)).to(dtype)
    cos, sin = entries[:, None].unbind(2)
    return cos, sin


def route(
    outputs: Sequence[float], mixture: MixtureConfig, correction: Sequence[float] | None = None
) -> tuple[list[int], list[float]]:
    """Return the experts of a row in rising order, and their weights.

    ``outputs`` are those of the router; :class:`MixtureConfig` has the formulas.
    """
    experts = range(mixture.experts)
    if mixture.scores == "sigmoid":
        scores = [1 / (1 + math.exp(-each)) for each in outputs]
    else:
        powers = [math.exp(each - max(outputs)) for each in outputs]
        scores = [each / sum(powers) for each in powers]
    ranks = list(scores)
    if correction is not None:
        ranks = [score + added for score, added in zip(scores, correction, strict=True)]
    size = mixture.experts // mixture.groups
    members = [ranks[size * group : size * (group + 1)] for group in range(mixture.groups)]
    values = [sum(sorted(each, reverse=True)[: mixture.group_best]) for each in members]
    # ``sorted`` keeps the order of equal values.
    groups = sorted(range(mixture.groups), key=lambda group: -values[group])[: mixture.row_groups]
    allowed = [expert for expert in experts if expert // size in groups]
    chosen = sorted(sorted(allowed, key=lambda expert: -ranks[expert])[: mixture.per_row])
    weights = [scores[expert] for expert in chosen]
    if mixture.normalized:
        total = sum(weights) + mixture.epsilon
        weights = [weight / total for weight in weights]
    return chosen, [mixture.scale * weight for weight in weights]


class DenseLayer(nn.Module):
    """A transformer layer on the rows ``[rows, hidden]`` of one text; weights are uninitialized."""

    def __init__(self, config: ModelConfig, mixture: MixtureConfig | None) -> None:
        super().__init__()
        self.config = config
        self.mixture = mixture
        before = config.norm_places != "output"
        after = config.norm_places != "input"
        self.attention_norm = _norm(config) if before else nn.Identity()
        self.attention_output_norm = _norm(config) if after else nn.Identity()
        self.qkv = _linear(sum(config.qkv_sizes), config.hidden_size, bias=config.qkv_bias)
        queries, keys, _ = config.qkv_sizes if config.whole_qk_norm else (config.head_dim,) * 3
        self.q_norm = nn.RMSNorm(queries, config.norm_eps) if config.qk_norm else None
        self.k_norm = nn.RMSNorm(keys, config.norm_eps) if config.qk_norm else None
        self.out = _linear(
            config.hidden_size, config.num_heads * config.head_dim, bias=config.out_bias
        )
        self.mlp_norm = _norm(config) if before else nn.Identity()
        self.mlp_output_norm = _norm(config) if after else nn.Identity()
        self.router: nn.Module | None = None
        self.up: nn.Module
        self.down: nn.Module
        fold = 2 if config.gated else 1
        if mixture is None:
            width = config.intermediate_size
            self.up = _linear(fold * width, config.hidden_size, bias=config.mlp_bias)
            self.down = _linear(config.hidden_size, width, bias=config.mlp_bias)
            return
        numbers = range(mixture.experts)
        width = mixture.width
        self.router = _linear(mixture.experts, config.hidden_size, bias=False)
        self.up = nn.ModuleList(
            _linear(fold * width, config.hidden_size, bias=False) for _ in numbers
        )
        self.down = nn.ModuleList(_linear(config.hidden_size, width, bias=False) for _ in numbers)
        if mixture.correction:
            self.correction = nn.Parameter(torch.empty(mixture.experts))
        if mixture.shared_width:
            shared = mixture.shared_width
            self.shared_up = _linear(fold * shared, config.hidden_size, bias=False)
            self.shared_down = _linear(config.hidden_size, shared, bias=False)

    def forward(self, x: Tensor, rotations: Rotations, index: int, attend: Attend) -> Tensor:
        """Return the output ``[rows, hidden]``; ``index`` is the number of the layer, from 0."""
        x = self.apply_attention(x, rotations, index, attend)
        normed = self.mlp_norm(x)
        branch = self._mlp(self.up, self.down, normed) if self.router is None else self._mix(normed)
        return x + self.config.residual_scale * self.mlp_output_norm(branch)

    def apply_attention(
        self, x: Tensor, rotations: Rotations, index: int, attend: Attend
    ) -> Tensor:
        """Return ``x`` plus its self-attention; the arguments are those of :meth:`forward`."""
        c = self.config
        q, k, v = self.qkv(self.attention_norm(x)).split(c.qkv_sizes, dim=-1)
        if c.whole_qk_norm:
            q, k = self._norm_queries_and_keys(q, k)
        q, k, v = (each.unflatten(-1, (-1, c.head_dim)) for each in (q, k, v))
        if not c.whole_qk_norm:
            q, k = self._norm_queries_and_keys(q, k)
        attended = attend(index, rotate(q, rotations), rotate(k, rotations), v)
        return x + c.residual_scale * self.attention_output_norm(self.out(attended))

    def _norm_queries_and_keys(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return (
            (q, k)
            if self.q_norm is None or self.k_norm is None
            else (self.q_norm(q), self.k_norm(k))
        )

    def _mlp(self, up: nn.Module, down: nn.Module, x: Tensor) -> Tensor:
        activate = ACTIVATIONS[self.config.activation]
        hidden = up(x)
        if not self.config.gated:
            return down(activate(hidden))
        gate, hidden = hidden.chunk(2, dim=-1)
        return down(activate(gate) * hidden)

    def _mix(self, x: Tensor) -> Tensor:
        """Return the weighted sums of the outputs of each row's experts, and the shared expert."""
        assert self.mixture is not None
        assert self.router is not None
        assert isinstance(self.up, nn.ModuleList)
        assert isinstance(self.down, nn.ModuleList)
        scores = self.router(x)
        correction = self.correction.tolist() if self.mixture.correction else None
        outputs = []
        for row, numbers in enumerate(scores.tolist()):
            total = torch.zeros(x.shape[1:], dtype=torch.promote_types(x.dtype, torch.float32))
            for number, share in zip(*route(numbers, self.mixture, correction), strict=True):
                total += share * self._mlp(self.up[number], self.down[number], x[row])
            outputs.append(total)
        mixed = torch.stack(outputs).to(x.dtype)
        if self.mixture.shared_width:
            mixed = mixed + self._mlp(self.shared_up, self.shared_down, x)
        return mixed


class DenseModel(nn.Module):
    """A language model on the rows of one text; its weights are not initialized.

    It lacks short convolutions, attention sinks and queries that grow with the position.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Parameter(torch.empty(config.vocab_size, config.hidden_size))
        learned = config.rope is None
        self.positions = (
            nn.Parameter(torch.empty(config.context, config.hidden_size)) if learned else None
        )
        self.layers = nn.ModuleList(
            DenseLayer(config, config.mixture_of(layer)) for layer in range(config.num_layers)
        )
        self.norm = _norm(config)
        self.head = _linear(config.vocab_size, config.hidden_size, bias=False)
        if config.tied:
            self.head.weight = self.embedding

    def embed(self, tokens: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the input of layer 0, ``[tokens, hidden]``."""
        x = self.embedding[list(tokens)].to(dtype)
        if self.positions is not None:
            x = x + self.positions[: len(tokens)].to(dtype)
        return x * torch.tensor(self.config.embedding_scale, dtype=dtype)

    def rotations(self, layer: int, length: int, dtype: torch.dtype = torch.float32) -> Rotations:
        """Return the rotations of a text of ``length`` tokens in a layer."""
        return dense_rotations(self.config.rope_of(layer), length, dtype)

    @torch.no_grad()
    def states(
        self,
        tokens: Sequence[int],
        dtype: torch.dtype = torch.float32,
        attend: Attend | None = None,
    ) -> list[Tensor]:
        """Return the input of layer 0 and the output of each layer, ``[tokens, hidden]`` each."""
        found = [self.embed(tokens, dtype)]
        attend = attend or DenseAttend(self.config)
        for index, layer in enumerate(self.layers):
            found.append(layer(found[-1], self.rotations(index, len(tokens), dtype), index, attend))
        return found

    @torch.no_grad()
    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits ``[rows, vocab]`` of outputs ``[rows, hidden]`` of the last layer."""
        logits = self.head(self.norm(hidden)) * self.config.logits_scale
        cap = self.config.logits_cap
        return logits if cap is None else cap * torch.tanh(logits / cap)


def _norm(config: ModelConfig) -> nn.Module:
    kind = nn.RMSNorm if config.norm == "rms" else nn.LayerNorm
    return kind(config.hidden_size, config.norm_eps)


def _linear(outputs: int, inputs: int, *, bias: bool) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=bias, device="meta").to_empty(device="cpu")


def dense_logits(
    model: DenseModel,
    tokens: Sequence[int],
    dtype: DType = FLOAT32,
    rounding: Rounding | None = None,
) -> Array:
    """Return logits ``[len(tokens), vocab]`` of a whole text in one pass, in float32 or wider."""
    size = torch_dtype(dtype)
    *_, hidden = model.states(tokens, size, DenseAttend(model.config, rounding))
    return to_array(model.logits(hidden).to(torch.promote_types(size, torch.float32)))
