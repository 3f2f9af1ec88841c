"""An EAGLE-3 or MTP head, of one layer, as a module of torch for training.

The tensors have the names of the layout speculators (vLLM); those of an MTP head are renamed when
it is exported. An EAGLE-3 head has an LM head of its own, an MTP head uses the target's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pronk.drafting import EagleConfig
from pronk.train.attention import ChainAttention
from pronk.train.modules.decoder import (
    DecoderModule,
    Rotations,
    apply_rope,
    empty_linear,
    initialize_parameters,
)

# root mean square of the features with the first weights; the inputs of ``fc`` are normed
_FEATURE = 0.3
# probability of acceptance that is assumed for each draft position before any is measured
_ACCEPTANCE = 0.5
# Length of the directions to which the first query and key matrices map, with which the score of a
# row with itself is 8 to 16: a row then attends mostly to itself.
_SELF = 1.3
_MTP_NAMES = {  # for each module of an MTP head: its name in the layout speculators
    "token_norm": "token_layernorm.",
    "feature_norm": "hidden_layernorm.",
    "fc": "input_proj.",
    "norm": "final_layernorm.",
    "layers": "",
}
# The first weights of the final norm are the target's times this factor, so that the first logits
# are small.
_NORM_SCALE = 0.1


class LinearStart(NamedTuple):
    """Result of a least-squares fit: the target's last output is predicted as ``A x + B e``.

    Each channel of the output is divided by its root mean square.

    ``x`` are the outputs of the target's layers, and ``e`` is the embedding of the next token
    (:mod:`pronk.train.head_plan`).
    """

    from_hidden: Tensor  # the matrix A, ``[size, sources * size]``
    from_embedding: Tensor  # the matrix B, ``[size, size]``
    embeddings: Tensor  # mean of ``e e^T`` over the data, ``[size, size]``
    scale: float  # root mean square of ``A x + B e``


class _EagleBlock(nn.Module):
    """The layer of the head: attention, then MLP.

    In EAGLE-3, queries, keys and values are computed from embedding and feature side by side; in
    MTP, a linear layer has joined the two before.
    """

    def __init__(self, eagle: EagleConfig) -> None:
        super().__init__()
        config = eagle.layers
        size = config.hidden_size
        (q, kv, _) = config.qkv_sizes
        self.input_layernorm = nn.RMSNorm(size, config.norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(size, config.norm_eps)
        inputs = size
        if eagle.kind == "eagle3":
            inputs = 2 * size
            self.hidden_norm = nn.RMSNorm(size, config.norm_eps)
        self.self_attn = _linears(
            q_proj=(q, inputs), k_proj=(kv, inputs), v_proj=(kv, inputs), o_proj=(size, q)
        )
        mlp = config.intermediate_size
        self.mlp = _linears(gate_proj=(mlp, size), up_proj=(mlp, size), down_proj=(size, mlp))


class EagleModule(nn.Module):
    """An EAGLE-3 or MTP head; the weights of a new object are uninitialized.

    Args:
        eagle: configuration of the head.
        num_sources: number of the target's layers whose outputs the head reads.
        draft_ids: the draft vocabulary, the tokens in the loss: the target's ids, int64
            ``[draft_vocab]``, ascending.
        depth: number of draft positions in training.
    """

    d2t: Tensor  # int64 ``[draft_vocab]``: the target's id minus the index in the draft vocabulary
    t2d: Tensor  # bool ``[vocab]``: whether a token of the target is in the draft vocabulary
    target_norm: Tensor  # weight of the target's final norm, in MTP heads only
    # Running mean of the acceptance of each draft position, for the weighting D-PACE of the loss;
    # not exported.
    acceptance: Tensor

    def __init__(
        self, eagle: EagleConfig, num_sources: int, draft_ids: Tensor, depth: int = 1
    ) -> None:
        super().__init__()
        config = eagle.layers
        self.eagle = eagle
        self.draft_ids = draft_ids
        size = config.hidden_size
        width = eagle.target_hidden_size
        self.is_mtp = eagle.kind == "mtp"
        self.fc = empty_linear(size, 2 * size if self.is_mtp else num_sources * width, bias=False)
        self.fc_norm = nn.ModuleList(
            nn.RMSNorm(width, config.norm_eps) for _ in range(num_sources * eagle.fc_norm)
        )
        self.layers = nn.ModuleList([_EagleBlock(eagle)])
        self.norm = nn.RMSNorm(size, config.norm_eps)
        self.lm_head = None if self.is_mtp else empty_linear(len(draft_ids), size, bias=False)
        if self.is_mtp:
            self.token_norm = nn.RMSNorm(size, config.norm_eps)
            self.feature_norm = nn.RMSNorm(size, config.norm_eps)
        # ``d2t`` and ``t2d`` are buffers, so they are in the exported file.
        self.register_buffer("d2t", draft_ids - torch.arange(len(draft_ids)))
        self.register_buffer("t2d", torch.isin(torch.arange(config.vocab_size), draft_ids))
        self.register_buffer("acceptance", torch.full((depth,), _ACCEPTANCE))
        if self.is_mtp:
            self.register_buffer("target_norm", torch.ones(size))
        self.rotations = Rotations(config.rope)

    def exported(self) -> dict[str, Tensor]:
        """Return the tensors of the head's file, by their names in the layout speculators."""
        tensors = self.state_dict()
        if not self.is_mtp:
            return {name: tensor for name, tensor in tensors.items() if name != "acceptance"}
        stored = {}
        for name, tensor in tensors.items():
            module, _, rest = name.partition(".")
            if module in _MTP_NAMES:
                stored[f"mtp_layers.0.{_MTP_NAMES[module]}{rest.removeprefix('0.')}"] = tensor
        return stored

    @property
    def input_norms(self) -> Sequence[nn.RMSNorm]:
        """Norms of the target's outputs, one for each layer that the head reads."""
        if self.is_mtp:
            return [self.feature_norm]
        return [norm for norm in self.fc_norm if isinstance(norm, nn.RMSNorm)]

    def inputs(self, hidden: Tensor) -> Tensor:
        """Return the input of :meth:`fuse`, given the outputs of the target's layers.

        In MTP it is the last layer's output after the target's final norm; in EAGLE-3 the outputs
        are unchanged.
        """
        if not self.is_mtp:
            return hidden
        return F.rms_norm(hidden, hidden.shape[-1:], self.target_norm)

    def fuse(self, hidden: Tensor) -> Tensor:
        """Return the features ``[rows, hidden]`` that the layer reads.

        ``hidden`` ``[rows, sources * size]`` are the outputs of the target's layers, side by side.
        """
        if self.is_mtp:  # ``hidden`` is the output of the target's final norm, which is the feature
            return hidden
        if self.fc_norm:
            parts = hidden.chunk(len(self.fc_norm), dim=-1)
            normed = [norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)]
            hidden = torch.cat(normed, dim=-1)
        features: Tensor = self.fc(hidden).float()  # norms and residual stream are float32
        return features

    def forward(
        self,
        embedding: Tensor,
        feature: Tensor,
        positions: Tensor,
        attend: ChainAttention,
        active: Tensor | None = None,
    ) -> Tensor:
        """Return the layer's output ``[active rows, hidden]``.

        Args:
            embedding: ``[rows, hidden]``, embeddings of the tokens after those of ``feature``.
            feature: ``[rows, hidden]``, features of the target, or outputs of the head.
            positions: ``[rows]``, for RoPE.
            attend: the attention, which receives the keys and values of all rows.
            active: indices of the rows whose output is needed; ``None``: all rows.
        """
        block = self.layers[0]
        config = self.eagle.layers
        assert isinstance(block, _EagleBlock)
        if self.is_mtp:
            both = torch.cat((self.token_norm(embedding), self.feature_norm(feature)), dim=-1)
            residual = self.fc(both).float()
            x = block.input_layernorm(residual)
        else:
            normed = block.hidden_norm(feature)
            x = torch.cat((block.input_layernorm(embedding), normed), dim=-1)
            residual = normed if self.eagle.norm_before_residual else feature
        rope = self.rotations(positions, torch.float32)
        attention = block.self_attn
        k = attention["k_proj"](x).view(len(x), config.num_kv_heads, config.head_dim)
        v = attention["v_proj"](x).view(len(x), config.num_kv_heads, config.head_dim)
        k = k if rope is None else apply_rope(k.float(), *rope)
        if active is not None:
            x = x[active]
            residual = residual[active]
            rope = None if rope is None else (rope[0][active], rope[1][active])
        q = attention["q_proj"](x).view(len(x), config.num_heads, config.head_dim)
        q = q if rope is None else apply_rope(q.float(), *rope)
        y = residual + attention["o_proj"](attend(q, k, v.float()))
        z = block.post_attention_layernorm(y)
        mlp = block.mlp
        out: Tensor = y + mlp["down_proj"](F.silu(mlp["gate_proj"](z)) * mlp["up_proj"](z))
        return out

    def read_out(self, out: Tensor) -> tuple[Tensor, Tensor]:
        """Return the input of the LM head, and the feature that the next step reads.

        ``out`` is the layer's output; both results have its shape.
        """
        normed = self.norm(out)
        feature = normed if self.eagle.norm_output else out
        return normed, feature

    @torch.no_grad()
    def begin_linear(
        self,
        start: LinearStart,
        channels: Tensor,
        target: DecoderModule,
        generator: torch.Generator,
    ) -> None:
        """Set the first weights so that the head computes ``A x + B e``, the linear fit ``start``.

        The fit predicts the target's last output with each channel divided by its root mean square
        ``channels`` ``[size]``; the final norm multiplies by it. In the last output of Gemma 3
        270M, one channel is 80 times the median, and steps of training of equal size in all
        channels would hide the others.

        The MLP adds nothing at first. Small random weights would add noise of equal size to all
        channels, which hides the small ones.
        """
        config = self.eagle.layers
        block = self.layers[0]
        assert isinstance(block, _EagleBlock)
        size = config.hidden_size
        heads = config.num_heads
        kv_heads = config.num_kv_heads
        d = config.head_dim
        group = heads // kv_heads
        self.norm.weight.copy_(start.scale * channels * target.norm.get_parameter("weight"))
        block.mlp.get_parameter("down_proj.weight").zero_()
        if self.is_mtp:
            self.fc.weight.copy_(torch.cat((start.from_embedding, start.from_hidden), dim=-1))
            block.self_attn.get_parameter("o_proj.weight").zero_()
            return
        self.fc.weight.copy_(start.from_hidden)
        left, right = low_rank(start.from_embedding, start.embeddings, kv_heads * d)
        attention = {
            name: block.self_attn.get_parameter(f"{name}.weight") for name in block.self_attn
        }
        attention["v_proj"].zero_()
        attention["v_proj"][: len(right), :size] = right
        # The query heads of a group have the same output, so each gets an equal part of ``left``.
        spread = left.new_zeros(size, kv_heads * d)
        spread[:, : left.shape[1]] = left / group
        by_query_head = spread.view(size, kv_heads, 1, d).expand(-1, -1, group, -1)
        attention["o_proj"].copy_(by_query_head.reshape(size, -1))
        # Queries and keys get equal random directions, so that a row's score with itself is the
        # highest.
        keys = torch.nn.init.orthogonal_(attention["k_proj"][:, :size].clone(), _SELF, generator)
        attention["k_proj"][:, :size] = keys
        queries = keys.view(kv_heads, 1, d, size).expand(-1, group, -1, -1)
        attention["q_proj"][:, :size] = queries.reshape(heads * d, size)

    def initialize(self, target: DecoderModule, generator: torch.Generator) -> None:
        """Set small random matrices; copy the target's LM head, with a norm for small logits.

        The target's last layer is not copied: it predicts the token that the head already knows,
        with high confidence.
        """
        initialize_parameters(self.named_parameters(), generator)
        deviation = _FEATURE * self.fc.weight.shape[1] ** -0.5
        with torch.no_grad():
            self.fc.weight.normal_(0.0, deviation, generator=generator)
            self.norm.weight.copy_(_NORM_SCALE * target.norm.get_parameter("weight"))
            if self.is_mtp:
                self.target_norm.copy_(target.norm.get_parameter("weight"))
            if self.lm_head is not None:
                self.lm_head.weight.copy_(target.head.get_parameter("weight")[self.draft_ids])


def _linears(**shapes: tuple[int, int]) -> nn.ModuleDict:
    """Return linear layers without bias, by name; each shape is (outputs, inputs)."""
    return nn.ModuleDict({name: empty_linear(*shape, bias=False) for name, shape in shapes.items()})


def low_rank(matrix: Tensor, moments: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Return ``left [size, rank]`` and ``right [rank, size]``, whose product is near ``matrix``.

    Of all products of this rank, it has the smallest mean of ``|left right e - matrix e|²`` over
    inputs ``e`` with the mean ``moments`` of ``e e^T``, ``[size, size]``.
    """
    values, vectors = torch.linalg.eigh(moments.double())
    deviations = values.clamp_min(1e-9).sqrt()
    root = vectors * deviations
    inverse = vectors / deviations
    u, s, v = torch.linalg.svd(matrix.double() @ root)
    rank = min(rank, len(s))
    scale = s[:rank].sqrt()
    left = u[:, :rank] * scale
    right = scale[:, None] * (v[:rank] @ inverse.T)
    return left.float(), right.float()
