"""Sizes, draft vocabulary and first weights of an EAGLE-3 or MTP head, before the training.

The first weights are a least-squares fit, unless another head gives them
(:mod:`pronk.train.initial_head`). Let ``x`` be the outputs of the target's layers at a position,
scaled so that all channels have the same mean square; ``e`` the normed embedding of the next token;
and ``z`` the target's last output at the position of the next token, after the final norm without
its weight, and scaled likewise. The matrices ``A`` and ``B`` with the smallest mean of
``|A x + B e - z|²`` are known in closed form. An EAGLE-3 head computes ``A x + B e`` if ``A`` is
its ``fc``, each row attends to itself alone, and values and output projection have the product
``B``, up to the rank of the values. The ``fc`` of an MTP head has both matrices, ``B`` and ``A``.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from pronk import OptionError
from pronk.base import refuse
from pronk.checkpoint import Fingerprint, ModelConfig, RopeConfig
from pronk.drafting import EagleConfig, default_sources
from pronk.train.corpus.answers import Dialogue
from pronk.train.modules.decoder import DecoderModule
from pronk.train.modules.eagle import EagleModule, LinearStart
from pronk.train.options import EagleOptions
from pronk.train.target_states import StateSource

_SAMPLES = 128  # number of dialogues to which the first weights are fitted
# Added to the mean squares of channels before they are inverted; their mean is 1. The smallest
# weight of the final norm by which a vector is divided.
_SMALL = 1e-4
# added to the diagonal of the Gram matrix, whose mean is 1, so that it can be inverted
_RIDGE = 1e-3


def draft_vocabulary(dialogues: Iterable[Dialogue], size: int, vocab_size: int) -> Tensor:
    """Return the ids of the ``size`` most frequent tokens of the answers.

    The ids are in ascending order, and below ``vocab_size``.
    """
    counts = _count_answers(dialogues)
    ranked = sorted(range(vocab_size), key=lambda token: (-counts[token], token))[:size]
    return torch.tensor(sorted(ranked))


def coverage(dialogues: Iterable[Dialogue], draft_ids: Tensor) -> float:
    """Return the fraction (0..1) of the answers' tokens that are among ``draft_ids``."""
    counts = _count_answers(dialogues)
    covered = sum(counts[token] for token in draft_ids.tolist())
    return covered / max(1, counts.total())


def _count_answers(dialogues: Iterable[Dialogue]) -> Counter[int]:
    """Return how often each token occurs in the answers."""
    counts: Counter[int] = Counter()
    for dialogue in dialogues:
        for start, end in dialogue.answers:
            counts.update(dialogue.ids[start:end])
    return counts


def head_config(
    target: ModelConfig,
    options: EagleOptions,
    verifier: str | None,
    fingerprint: Fingerprint | None,
) -> EagleConfig:
    """Return the configuration of a head for a target.

    Its layer is that of a Llama, with the sizes of the target's layers, except as the options say.
    ``verifier`` is the target's name, and ``fingerprint`` that of its weights, both stored in the
    head's file.

    Raises:
        OptionError: the target has no RMSNorm.
    """
    if target.norm != "rms":
        msg = (
            f"model: expected a target with RMSNorm, found {target.family} with LayerNorm; use a "
            "drafter without training, such as suffix"
        )
        raise OptionError(msg)
    # The file format of heads cannot describe other kinds of scaling, and no rotation of a part of
    # each head.
    rope = replace(target.rope or RopeConfig(target.head_dim), dim=target.head_dim)
    if rope.kind not in ("default", "linear", "llama3"):
        rope = RopeConfig(target.head_dim, rope.theta)
    layer = replace(
        target.plain_layers(0),
        family="llama",
        num_layers=1,
        windows=(None,),
        intermediate_size=options.mlp or target.intermediate_size,
        activation="silu",
        gated=True,
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
    draft_vocab = min(options.draft_vocab, target.vocab_size)
    return EagleConfig(
        options.kind,
        layer,
        target.vocab_size if is_mtp else draft_vocab,
        target.hidden_size,
        None if is_mtp else sources,
        # Norm the inputs: in the outputs of some layers, single values are a thousand times the
        # others.
        fc_norm=not is_mtp,
        norm_output=is_mtp,
        num_wide=0 if is_mtp else 1,
        verifier=verifier,
        fingerprint=fingerprint,
    )


def check_answers(path: Path, weights: str, target: Fingerprint) -> None:
    """Raise OptionError if another model than the target wrote the answers in the file ``path``.

    ``weights`` is the fingerprint of the weights in the header of the file.
    """
    if weights != target.weights:
        msg = (
            f"{path}: expected answers of the model with weights {target.weights}, found those of "
            f"another ({weights}); let this one write them: pronk train texts"
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
    """Set the first weights of a head by a least-squares fit to some of the dialogues.

    A dialogue is cut to ``length`` tokens. The weights of the input norms are set so that all
    channels have the same mean square, because a few channels of the target's outputs are tens of
    times larger than the others, and nearly constant. The predicted last output is scaled likewise.
    """
    answered = [each for each in dialogues if each.answers and 1 < each.answers[0][0] < length]
    if not answered:
        longest = "than the prompts of the dialogues"
        refuse("length", f"expected more tokens {longest}, found {length}; raise it", OptionError)
    count = len(module.input_norms)
    size = target.config.hidden_size
    weight = target.norm.get_parameter("weight").float()
    weight = weight.where(weight.abs() > _SMALL, math.inf)

    def rows() -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        for each in answered[:_SAMPLES]:
            ids = torch.tensor(each.ids[:length])
            first = each.answers[0][0] - 1
            found = states(ids.tolist(), first)
            hidden = module.inputs(found.hidden[first - 1 : -1].float())
            x = F.rms_norm(hidden.unflatten(-1, (count, size)), (size,))
            e = F.rms_norm(target.embedding[ids[first:]].float(), (size,))
            yield x.flatten(1), e, found.last.float() / weight

    fitted = fit(rows())
    for norm, values in zip(module.input_norms, fitted.balance.chunk(count), strict=True):
        norm.get_parameter("weight").copy_(values)
    module.begin_linear(fitted.start, fitted.channels, target, generator)


class Fit(NamedTuple):
    """The best linear prediction of scaled outputs from scaled inputs, and the scales."""

    start: LinearStart  # of ``z / channels`` from ``balance * x`` and ``e``
    balance: Tensor  # ``[sources * size]``, inverse of the root mean square of each channel of x
    channels: Tensor  # ``[size]``, root mean square of each channel of z


def fit(rows: Iterable[tuple[Tensor, Tensor, Tensor]]) -> Fit:
    """Return the matrices ``A`` and ``B`` for which ``A x + B e`` is nearest to ``z``, scaled.

    ``rows`` yields the data in one or several parts: the target's outputs ``x`` ``[rows, sources *
    size]``, the embeddings ``e`` and the targets ``z``, both ``[rows, size]``. One part at a time
    is kept.
    """
    sums = list[Tensor]()
    count = 0
    width = 0
    for x, e, z in rows:
        inputs = torch.cat((x, e), dim=-1)
        own = [(inputs.T @ inputs).double(), (inputs.T @ z).double(), z.double().square().sum(0)]
        if sums:
            own = [total + part for total, part in zip(sums, own, strict=True)]
        sums = own
        width = x.shape[1]
        count = count + len(x)
    gram, products, squares = (each / count for each in sums)
    balance = gram.diagonal()[:width].add(_SMALL).rsqrt()
    channels = squares.add(_SMALL**2).sqrt()
    scale = torch.cat((balance, balance.new_ones(len(gram) - width)))
    gram = scale[:, None] * gram * scale
    products = scale[:, None] * products / channels
    weights = torch.linalg.solve(gram + _RIDGE * torch.eye(len(gram), dtype=gram.dtype), products)
    square = (weights * (gram @ weights)).sum() / weights.shape[1]
    solution = weights.T.float()
    start = LinearStart(
        solution[:, :width], solution[:, width:], gram[width:, width:].float(), math.sqrt(square)
    )
    return Fit(start, balance.float(), channels.float())
