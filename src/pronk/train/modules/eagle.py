"""An EAGLE-3 head as a module of torch, for training.

Its state dict has the names of the layout speculators. The formulas are those of
:mod:`pronk.drafters.from_target.modules.eagle`, for one layer.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pronk.drafters.from_target.modules.eagle_config import EagleConfig
from pronk.train.least_squares import LinearStart, low_rank
from pronk.train.modules.decoder import DecoderModule, Rotations, apply_rope, empty_linear

__all__ = ["ChainAttend", "EagleModule"]

_INITIAL = 0.02  # standard deviation of the layer's initial weights
_FEATURE = 0.3  # root mean square of the initial features, whose inputs are normed
_ACCEPTANCE = 0.5  # assumed at first
_SELF = 1.3  # length of the directions of queries and keys: a row's score with itself is 8 to 16
_LOGITS = 0.1  # initial weights of the final norm, relative to the target's


class ChainAttend(Protocol):
    """Attention of the head over the rows of a training batch, implemented by the caller."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return ``[rows, heads * d]`` for ``q [rows, heads, d]``, ``k`` and ``v [keys, kv_heads, d]``."""
        ...


class _EagleBlock(nn.Module):
    """The layer of the head, whose attention reads the embedding and the feature."""

    def __init__(self, eagle: EagleConfig) -> None:
        super().__init__()
        config = eagle.layers
        size, (q, kv, _) = config.hidden_size, config.qkv_sizes
        self.input_layernorm, self.hidden_norm, self.post_attention_layernorm = (
            nn.RMSNorm(size, config.norm_eps) for _ in range(3)
        )
        self.self_attn = _linears(q_proj=(q, 2 * size), k_proj=(kv, 2 * size), v_proj=(kv, 2 * size), o_proj=(size, q))
        mlp = config.intermediate_size
        self.mlp = _linears(gate_proj=(mlp, size), up_proj=(mlp, size), down_proj=(size, mlp))


class EagleModule(nn.Module):
    """The head; weights of a new object are uninitialized.

    Attributes:
        draft_ids: the target's ids of the draft vocabulary, int64 ``[draft_vocab]``, ascending.
    """

    d2t: Tensor
    t2d: Tensor
    acceptance: Tensor  # running mean of the acceptance of each draft position, for D-PACE; not exported

    def __init__(self, eagle: EagleConfig, num_sources: int, draft_ids: Tensor, depth: int = 1) -> None:
        super().__init__()
        config = eagle.layers
        self.eagle, self.draft_ids = eagle, draft_ids
        self.fc = empty_linear(config.hidden_size, num_sources * eagle.target_hidden_size, bias=False)
        sizes = [eagle.target_hidden_size] * num_sources if eagle.fc_norm else []
        self.fc_norm = nn.ModuleList(nn.RMSNorm(size, config.norm_eps) for size in sizes)
        self.layers = nn.ModuleList([_EagleBlock(eagle)])
        self.norm = nn.RMSNorm(config.hidden_size, config.norm_eps)
        self.lm_head = empty_linear(len(draft_ids), config.hidden_size, bias=False)
        # Buffers, so that the exported file has them: offsets to the target's ids, and which of these can be proposed.
        self.register_buffer("d2t", draft_ids - torch.arange(len(draft_ids)))
        self.register_buffer(
            "t2d", torch.zeros(config.vocab_size, dtype=torch.bool).index_fill(0, draft_ids, value=True)
        )
        self.register_buffer("acceptance", torch.full((depth,), _ACCEPTANCE))
        self.rotations = Rotations(config.rope)

    def exported(self) -> dict[str, Tensor]:
        """Return the tensors of the head's file."""
        return {name: tensor for name, tensor in self.state_dict().items() if name != "acceptance"}

    def fuse(self, hidden: Tensor) -> Tensor:
        """Map the outputs ``[rows, sources * size]`` of the target's layers to features ``[rows, hidden]``."""
        if self.fc_norm:
            parts = hidden.chunk(len(self.fc_norm), dim=-1)
            hidden = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], dim=-1)
        features: Tensor = self.fc(hidden).float()  # norms and residual stream are float32
        return features

    def forward(
        self, embedding: Tensor, feature: Tensor, positions: Tensor, attend: ChainAttend, active: Tensor | None = None
    ) -> Tensor:
        """Return the layer's output ``[active rows, hidden]``.

        Args:
            embedding: ``[rows, hidden]``, embeddings of the tokens after those of the features.
            feature: ``[rows, hidden]``.
            positions: ``[rows]``, for RoPE.
            attend: attention; it receives the keys and values of all rows.
            active: numbers of the rows whose output is needed; ``None``: all rows.
        """
        block, config = self.layers[0], self.eagle.layers
        assert isinstance(block, _EagleBlock)
        normed = block.hidden_norm(feature)
        x = torch.cat((block.input_layernorm(embedding), normed), dim=-1)
        residual = normed if self.eagle.norm_before_residual else feature
        rope = self.rotations(positions, torch.float32)
        attention = block.self_attn
        k = attention["k_proj"](x).view(len(x), config.num_kv_heads, config.head_dim)
        v = attention["v_proj"](x).view(len(x), config.num_kv_heads, config.head_dim)
        k = k if rope is None else apply_rope(k.float(), *rope)
        if active is not None:
            x, residual = x[active], residual[active]
            rope = None if rope is None else (rope[0][active], rope[1][active])
        q = attention["q_proj"](x).view(len(x), config.num_heads, config.head_dim)
        q = q if rope is None else apply_rope(q.float(), *rope)
        y = residual + attention["o_proj"](attend(q, k, v.float()))
        z, mlp = block.post_attention_layernorm(y), block.mlp
        out: Tensor = y + mlp["down_proj"](F.silu(mlp["gate_proj"](z)) * mlp["up_proj"](z))
        return out

    def read_out(self, out: Tensor) -> tuple[Tensor, Tensor]:
        """Return the normed output, which the LM head reads, and the feature of the next step."""
        normed = self.norm(out)
        return normed, normed if self.eagle.norm_output else out

    @torch.no_grad()
    def begin_linear(self, start: LinearStart, target: DecoderModule, generator: torch.Generator) -> None:
        """Let the head compute a linear prediction of the target's last output, and little else."""
        config, block = self.eagle.layers, self.layers[0]
        assert isinstance(block, _EagleBlock)
        size, heads, kv_heads, d = config.hidden_size, config.num_heads, config.num_kv_heads, config.head_dim
        group = heads // kv_heads
        self.fc.weight.copy_(start.from_hidden)
        self.norm.weight.copy_(start.scale * target.norm.get_parameter("weight"))
        left, right = low_rank(start.from_embedding, start.embeddings, kv_heads * d)
        attention = {name: block.self_attn.get_parameter(f"{name}.weight") for name in block.self_attn}
        attention["v_proj"].zero_()
        attention["v_proj"][: len(right), :size] = right
        spread = left.new_zeros(size, kv_heads * d)
        spread[:, : left.shape[1]] = left / group
        attention["o_proj"].copy_(spread.view(size, kv_heads, 1, d).expand(-1, -1, group, -1).reshape(size, -1))
        # Equal queries and keys of random directions: a row's product with itself is the largest.
        keys = torch.nn.init.orthogonal_(attention["k_proj"][:, :size].clone(), _SELF, generator)
        attention["k_proj"][:, :size] = keys
        queries = keys.view(kv_heads, 1, d, size).expand(-1, group, -1, -1)
        attention["q_proj"][:, :size] = queries.reshape(heads * d, size)

    def initialize(self, target: DecoderModule, generator: torch.Generator) -> None:
        """Begin with small random matrices and the target's LM head, whose logits are small at first.

        A copy of the target's last layer begins worse: it is confident of the token that is already known.
        """
        with torch.no_grad():
            for parameter in self.parameters():
                if parameter.dim() == 1:
                    parameter.fill_(1.0)
                else:
                    parameter.normal_(0.0, _INITIAL, generator=generator)
            self.fc.weight.normal_(0.0, _FEATURE * self.fc.weight.shape[1] ** -0.5, generator=generator)
            self.norm.weight.copy_(_LOGITS * target.norm.get_parameter("weight"))
            self.lm_head.weight.copy_(target.head.get_parameter("weight")[self.draft_ids])


def _linears(**shapes: tuple[int, int]) -> nn.ModuleDict:
    return nn.ModuleDict({name: empty_linear(*shape, bias=False) for name, shape in shapes.items()})
