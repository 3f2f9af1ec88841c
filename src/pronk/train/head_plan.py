"""Decisions before an EAGLE-3 head is trained: its sizes, and the tokens that it can propose."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from pronk.architecture.config import ModelConfig
from pronk.architecture.rope import RopeConfig
from pronk.corpus.answers import Dialogue
from pronk.drafters.from_target.modules.eagle_config import EagleConfig, default_sources
from pronk.errors import OptionError
from pronk.models.fingerprint import Fingerprint
from pronk.train.options import EagleOptions

__all__ = ["check_answers", "draft_vocabulary", "head_config"]


def draft_vocabulary(dialogues: Iterable[Dialogue], size: int, vocab_size: int) -> tuple[Tensor, float]:
    """Return the ids of the answers' most frequent tokens, ascending, and their share of the answers."""
    counts = Counter(
        token for dialogue in dialogues for start, end in dialogue.answers for token in dialogue.ids[start:end]
    )
    ranked = sorted(range(vocab_size), key=lambda token: (-counts[token], token))[:size]
    covered = sum(counts[token] for token in ranked) / max(1, counts.total())
    return torch.tensor(sorted(ranked)), covered


def head_config(
    target: ModelConfig, options: EagleOptions, verifier: str | None, fingerprint: Fingerprint | None
) -> EagleConfig:
    """Return the configuration of a head with the sizes of a layer of the target."""
    if target.norm != "rms" or not target.gated or target.activation != "silu":
        msg = f"model: expected a target of a Llama's kind, with RMSNorm and SwiGLU, found {target.family}"
        raise OptionError(msg)
    layer = replace(
        target.plain_layers(0),
        family="llama",
        num_layers=1,
        windows=(None,),
        intermediate_size=options.mlp or target.intermediate_size,
        rope=_rope(target),
        qkv_bias=False,
        out_bias=False,
        mlp_bias=False,
        qk_norm=False,
        tied=False,
        dtype="bfloat16",
        quantization=None,
    )
    is_mtp = options.kind == "mtp"
    sources = options.sources or default_sources(target.num_layers)
    return EagleConfig(
        options.kind,
        layer,
        target.vocab_size if is_mtp else min(options.draft_vocab, target.vocab_size),
        target.hidden_size,
        None if is_mtp else sources,
        fc_norm=not is_mtp,  # the outputs of some layers have single values a thousand times the others
        norm_output=is_mtp,
        num_wide=0 if is_mtp else 1,
        verifier=verifier,
        fingerprint=fingerprint,
    )


def _rope(target: ModelConfig) -> RopeConfig:
    """Return the target's RoPE, without a scaling that files of heads cannot describe."""
    rope = target.rope or RopeConfig(target.head_dim)
    return rope if rope.kind in ("default", "linear", "llama3") else RopeConfig(target.head_dim, rope.theta)


def check_answers(path: Path, weights: str, target: Fingerprint) -> None:
    """Raise if another model wrote the answers."""
    if weights != target.weights:
        msg = (
            f"{path}: expected answers of the model with weights {target.weights}, found those of another ({weights}); "
            "let this one write them: pronk train texts"
        )
        raise OptionError(msg)
