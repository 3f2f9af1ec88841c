"""Before an EAGLE-3 or MTP head is trained: its sizes, draft vocabulary and first weights.

The first weights are a least-squares fit. Let ``x`` be the balanced outputs of the target's layers
at a position, ``e`` the normed embedding of the next token, and ``z`` the target's last output
there, one position further, after the final norm without its weight. The matrices ``A`` and ``B``
with the smallest mean of ``|A x + B e - z|²`` are known in closed form. A head computes ``A x + B
e`` if ``A`` is its ``fc``, each row attends to itself alone, and values and output projection have
the product ``B``, up to the rank of the values. The ``fc`` of an MTP head has ``B`` and ``A``.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from pronk import OptionError
from pronk.checkpoint import Fingerprint, ModelConfig, RopeConfig
from pronk.drafting import EagleConfig, default_sources
from pronk.train.corpus.answers import Dialogue
from pronk.train.modules.decoder import DecoderModule
from pronk.train.modules.eagle import EagleModule, LinearStart
from pronk.train.options import EagleOptions
from pronk.train.teacher import StateSource

_SAMPLES = 128  # dialogues to which the first weights are fitted
# added to mean squares, whose mean over all channels is 1; smallest weight to divide by
_SMALL = 1e-4
_RIDGE = 1e-3  # added to the mean squares, whose mean is 1


def draft_vocabulary(
    dialogues: Iterable[Dialogue], size: int, vocab_size: int
) -> tuple[Tensor, float]:
    """Return the ids of the answers' most frequent tokens, ascending, and their share of the answers."""
    counts = Counter(
        token
        for dialogue in dialogues
        for start, end in dialogue.answers
        for token in dialogue.ids[start:end]
    )
    ranked = sorted(range(vocab_size), key=lambda token: (-counts[token], token))[:size]
    covered = sum(counts[token] for token in ranked) / max(1, counts.total())
    return torch.tensor(sorted(ranked)), covered


def head_config(
    target: ModelConfig,
    options: EagleOptions,
    verifier: str | None,
    fingerprint: Fingerprint | None,
) -> EagleConfig:
    """Return the configuration of a head with the sizes of a layer of the target."""
    if target.norm != "rms" or not target.gated or target.activation != "silu":
        msg = (
            "model: expected a target of a Llama's kind, with RMSNorm and SwiGLU, found "
            f"{target.family}"
        )
        raise OptionError(msg)
    rope = target.rope or RopeConfig(target.head_dim)
    # a scaling that files of heads cannot describe
    if rope.kind not in ("default", "linear", "llama3"):
        rope = RopeConfig(target.head_dim, rope.theta)
    layer = replace(
        target.plain_layers(0),
        family="llama",
        num_layers=1,
        windows=(None,),
        intermediate_size=options.mlp or target.intermediate_size,
        rope=rope,
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
        # the outputs of some layers have single values a thousand times the others
        fc_norm=not is_mtp,
        norm_output=is_mtp,
        num_wide=0 if is_mtp else 1,
        verifier=verifier,
        fingerprint=fingerprint,
    )


def check_answers(path: Path, weights: str, target: Fingerprint) -> None:
    """Raise if another model wrote the answers."""
    if weights != target.weights:
        msg = (
            f"{path}: expected answers of the model with weights {target.weights}, found those of "
            f"another ({weights}); "
            "let this one write them: pronk train texts"
        )
        raise OptionError(msg)


@torch.no_grad()
def begin_linear(
    module: EagleModule,
    target: DecoderModule,
    states: StateSource,
    dialogues: Sequence[Dialogue],
    length: int,
    generator: torch.Generator,
) -> None:
    """Set the first weights of a head by some of the dialogues, cut to ``length`` tokens.

    The norms of the inputs give all channels the same mean square: a few channels of the target's
    outputs are tens of times larger than the others, and nearly constant.
    """
    count = len(module.input_norms)
    size = target.config.hidden_size
    weight = target.norm.get_parameter("weight").float()
    weight = weight.where(weight.abs() > _SMALL, math.inf)
    parts = []
    answered = (each for each in dialogues if each.answers and 1 < each.answers[0][0] < length)
    for each in islice(answered, _SAMPLES):
        ids = torch.tensor(each.ids[:length])
        first = each.answers[0][0] - 1
        found = states(ids.tolist(), first)
        hidden = module.inputs(found.hidden[first - 1 : -1].float())
        x = F.rms_norm(hidden.unflatten(-1, (count, size)), (size,))
        parts.append(
            (
                x,
                F.rms_norm(target.embedding[ids[first:]].float(), (size,)),
                found.last.float() / weight,
            )
        )
    if not parts:
        return
    balance = torch.cat([x for x, *_ in parts]).square().mean(0).add(_SMALL).rsqrt()
    for norm, values in zip(module.input_norms, balance, strict=True):
        norm.get_parameter("weight").copy_(values)
    module.begin_linear(
        fit(((x * balance).flatten(1), e, z) for x, e, z in parts), target, generator
    )


def fit(rows: Iterable[tuple[Tensor, Tensor, Tensor]]) -> LinearStart:
    """Return the matrices for parts (at least one) of ``x [rows, sources * size]``, ``e`` and ``z``."""
    sums = list[Tensor]()
    count = 0
    width = 0
    for x, e, z in rows:
        inputs = torch.cat((x, e), dim=-1)
        own = [(inputs.T @ inputs).double(), (inputs.T @ z).double()]
        sums = [one + other for one, other in zip(sums, own, strict=True)] if sums else own
        width = x.shape[1]
        count = count + len(x)
    gram, products = (each / count for each in sums)
    weights = torch.linalg.solve(gram + _RIDGE * torch.eye(len(gram), dtype=gram.dtype), products)
    square = (weights * (gram @ weights)).sum() / weights.shape[1]
    solution = weights.T.float()
    return LinearStart(
        solution[:, :width], solution[:, width:], gram[width:, width:].float(), math.sqrt(square)
    )
