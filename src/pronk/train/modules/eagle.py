"""An EAGLE-3 or MTP head as a module of torch, for training.

Its tensors have the names of the layout speculators, those of MTP after renaming. The formulas are
those of :mod:`pronk.drafting.from_target.modules.eagle`, for one layer. An MTP head has the
target's LM head.
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

_FEATURE = 0.3  # root mean square of the initial features, whose inputs are normed
_ACCEPTANCE = 0.5  # assumed at first
_SELF = 1.3  # length of the directions of queries and keys: a row's score with itself is 8 to 16
_MTP_NAMES = {  # modules of an MTP head in the layout speculators
    "token_norm": "token_layernorm.",
    "feature_norm": "hidden_layernorm.",
    "fc": "input_proj.",
    "norm": "final_layernorm.",
    "layers": "",
}
_LOGITS = 0.1  # initial weights of the final norm, relative to the target's


class LinearStart(NamedTuple):
    """Matrices of a linear prediction of ``z``."""

    from_hidden: Tensor  # ``[size, sources * size]``
    from_embedding: Tensor  # ``[size, size]``
    embeddings: Tensor  # ``[size, size]``, mean of ``e e^T``
    scale: float  # root mean square of the prediction


class _EagleBlock(nn.Module):
    """The layer of the head; with EAGLE-3 its attention reads the embedding and the feature."""

    def __init__(self, eagle: EagleConfig) -> None:
        super().__init__()
        config = eagle.layers
        size = config.hidden_size
        (q, kv, _) = config.qkv_sizes
        self.input_layernorm, self.post_attention_layernorm = (
            nn.RMSNorm(size, config.norm_eps) for _ in range(2)
        )
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
    """The head; weights of a new object are uninitialized.

    ``draft_ids`` are the target's ids of the tokens in the loss, int64 ``[draft_vocab]``,
    ascending.
    """

    d2t: Tensor
    t2d: Tensor
    target_norm: Tensor  # weight of the target's final norm, for MTP
    # running mean of the acceptance of each draft position, for D-PACE; not exported
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
            self.token_norm, self.feature_norm = (
                nn.RMSNorm(size, config.norm_eps) for _ in range(2)
            )
        # Buffers, so that the exported file has them: offsets to the target's ids, and which of
        # these can be proposed.
        self.register_buffer("d2t", draft_ids - torch.arange(len(draft_ids)))
        self.register_buffer("t2d", torch.isin(torch.arange(config.vocab_size), draft_ids))
        self.register_buffer("acceptance", torch.full((depth,), _ACCEPTANCE))
        if self.is_mtp:
            self.register_buffer("target_norm", torch.ones(size))
        self.rotations = Rotations(config.rope)

    def exported(self) -> dict[str, Tensor]:
        """Return the tensors of the head's file."""
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
        """Norms of the inputs from the target, one per source."""
        return (
            [self.feature_norm]
            if self.is_mtp
            else [norm for norm in self.fc_norm if isinstance(norm, nn.RMSNorm)]
        )

    def inputs(self, hidden: Tensor) -> Tensor:
        """Return the argument of :meth:`fuse` for outputs of the target's layers: of MTP after the final norm."""
        return F.rms_norm(hidden, hidden.shape[-1:], self.target_norm) if self.is_mtp else hidden

    def fuse(self, hidden: Tensor) -> Tensor:
        """Map the outputs ``[rows, sources * size]`` of the target's layers to features ``[rows, hidden]``."""
        if self.is_mtp:  # the feature is the output of the target's final norm
            return hidden
        if self.fc_norm:
            parts = hidden.chunk(len(self.fc_norm), dim=-1)
            hidden = torch.cat(
                [norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], dim=-1
            )
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

        ``embedding`` ``[rows, hidden]`` has the embeddings of the tokens after those of
        ``feature``, of the same shape; ``positions`` ``[rows]`` are for RoPE. ``attend`` receives
        the keys and values of all rows. ``active`` has the numbers of the rows whose output is
        needed; ``None``: all rows.
        """
        block = self.layers[0]
        config = self.eagle.layers
        assert isinstance(block, _EagleBlock)
        if self.is_mtp:
            residual = self.fc(
                torch.cat((self.token_norm(embedding), self.feature_norm(feature)), dim=-1)
            ).float()
            x = block.input_layernorm(residual)
        else:
            normed = block.hidden_norm(feature)
            x = torch.cat((block.input_layernorm(embedding), normed), dim=-1)
            residual = normed if self.eagle.norm_before_residual else feature
        rope = self.rotations(positions, torch.float32)
        attention = block.self_attn
        k, v = (
            attention[each](x).view(len(x), config.num_kv_heads, config.head_dim)
            for each in ("k_proj", "v_proj")
        )
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
        """Return the normed output, which the LM head reads, and the feature of the next step."""
        normed = self.norm(out)
        return normed, normed if self.eagle.norm_output else out

    @torch.no_grad()
    def begin_linear(
        self, start: LinearStart, target: DecoderModule, generator: torch.Generator
    ) -> None:
        """Let the head compute a linear prediction of the target's last output, and little else."""
        config = self.eagle.layers
        block = self.layers[0]
        assert isinstance(block, _EagleBlock)
        size = config.hidden_size
        heads = config.num_heads
        kv_heads = config.num_kv_heads
        d = config.head_dim
        group = heads // kv_heads
        self.norm.weight.copy_(start.scale * target.norm.get_parameter("weight"))
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
        spread = left.new_zeros(size, kv_heads * d)
        spread[:, : left.shape[1]] = left / group
        attention["o_proj"].copy_(
            spread.view(size, kv_heads, 1, d).expand(-1, -1, group, -1).reshape(size, -1)
        )
        # Equal queries and keys of random directions: a row's product with itself is the largest.
        keys = torch.nn.init.orthogonal_(attention["k_proj"][:, :size].clone(), _SELF, generator)
        attention["k_proj"][:, :size] = keys
        queries = keys.view(kv_heads, 1, d, size).expand(-1, group, -1, -1)
        attention["q_proj"][:, :size] = queries.reshape(heads * d, size)

    def initialize(self, target: DecoderModule, generator: torch.Generator) -> None:
        """Begin with small random matrices and the target's LM head, whose logits are small at first.

        A copy of the target's last layer begins worse: it is confident of the token that is already
        known.
        """
        initialize_parameters(self.named_parameters(), generator)
        with torch.no_grad():
            self.fc.weight.normal_(
                0.0, _FEATURE * self.fc.weight.shape[1] ** -0.5, generator=generator
            )
            self.norm.weight.copy_(_LOGITS * target.norm.get_parameter("weight"))
            if self.is_mtp:
                self.target_norm.copy_(target.norm.get_parameter("weight"))
            if self.lm_head is not None:
                self.lm_head.weight.copy_(target.head.get_parameter("weight")[self.draft_ids])


def _linears(**shapes: tuple[int, int]) -> nn.ModuleDict:
    return nn.ModuleDict({name: empty_linear(*shape, bias=False) for name, shape in shapes.items()})


def low_rank(matrix: Tensor, moments: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Return ``left [size, rank]`` and ``right [rank, size]`` with a product near ``matrix``.

    The product is the best one of this rank for inputs with the mean square products ``moments``.
    """
    values, vectors = torch.linalg.eigh(moments.double())
    root = vectors * values.clamp_min(1e-9).sqrt()
    u, s, v = torch.linalg.svd(matrix.double() @ root)
    rank = min(rank, len(s))
    inverse = vectors / values.clamp_min(1e-9).sqrt()
    return (u[:, :rank] * s[:rank].sqrt()).float(), (
        s[:rank].sqrt()[:, None] * (v[:rank] @ inverse.T)
    ).float()
