"""First weights of an EAGLE-3 or MTP head, by least squares instead of at random.

Let ``x`` be the balanced outputs of the target's layers at a position, ``e`` the normed embedding of the next token,
and ``z`` the target's last output there, one position further, after the final norm without its weight. The matrices
``A`` and ``B`` with the smallest mean of ``|A x + B e - z|²`` are known in closed form. A head computes ``A x + B e``
if ``A`` is its ``fc``, each row attends to itself alone, and values and output projection have the product ``B``, up to
the rank of the values. The ``fc`` of an MTP head has ``B`` and ``A``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import islice

import torch
import torch.nn.functional as F
from torch import Tensor

from pronk.corpus.answers import Dialogue
from pronk.train.modules.decoder import DecoderModule
from pronk.train.modules.eagle import EagleModule, LinearStart
from pronk.train.target_states import StateSource

__all__ = ["begin_linear", "fit"]

_SAMPLES = 128  # dialogues to which the first weights are fitted
_SMALL = 1e-4  # added to mean squares, whose mean over all channels is 1; smallest weight to divide by

_RIDGE = 1e-3  # added to the mean squares, whose mean is 1


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

    The norms of the inputs give all channels the same mean square: a few channels of the target's outputs are tens of
    times larger than the others, and nearly constant.
    """
    count, size = len(module.input_norms), target.config.hidden_size
    weight = target.norm.get_parameter("weight").float()
    weight = weight.where(weight.abs() > _SMALL, math.inf)
    parts = []
    answered = (each for each in dialogues if each.answers and 1 < each.answers[0][0] < length)
    for each in islice(answered, _SAMPLES):
        ids, first = torch.tensor(each.ids[:length]), each.answers[0][0] - 1
        found = states(ids.tolist(), first)
        hidden = module.inputs(found.hidden[first - 1 : -1].float())
        x = F.rms_norm(hidden.unflatten(-1, (count, size)), (size,))
        parts.append((x, F.rms_norm(target.embedding[ids[first:]].float(), (size,)), found.last.float() / weight))
    if not parts:
        return
    balance = torch.cat([x for x, *_ in parts]).square().mean(0).add(_SMALL).rsqrt()
    for norm, values in zip(module.input_norms, balance, strict=True):
        norm.get_parameter("weight").copy_(values)
    module.begin_linear(fit(((x * balance).flatten(1), e, z) for x, e, z in parts), target, generator)


def fit(rows: Iterable[tuple[Tensor, Tensor, Tensor]]) -> LinearStart:
    """Return the matrices for ``x [rows, sources * size]``, ``e`` and ``z [rows, size]``, given in parts.

    There must be at least one part.
    """
    sums, count, width = list[Tensor](), 0, 0
    for x, e, z in rows:
        inputs = torch.cat((x, e), dim=-1)
        own = [(inputs.T @ inputs).double(), (inputs.T @ z).double()]
        sums = [one + other for one, other in zip(sums, own, strict=True)] if sums else own
        width, count = x.shape[1], count + len(x)
    gram, products = (each / count for each in sums)
    weights = torch.linalg.solve(gram + _RIDGE * torch.eye(len(gram), dtype=gram.dtype), products)
    square = (weights * (gram @ weights)).sum() / weights.shape[1]
    solution = weights.T.float()
    return LinearStart(solution[:, :width], solution[:, width:], gram[width:, width:].float(), math.sqrt(square))
