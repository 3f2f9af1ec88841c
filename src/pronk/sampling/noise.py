"""Random numbers for sampling: hashes of seed, position and token.

By the *coupled* rule, the target's token at position ``p`` is ::

    argmax over tokens v of  processed log-probability(v) + Gumbel noise(seed, p, v)

This is a sample of the processed distribution (Gumbel 1954; Maddison et al. 2014). Greedy decoding is the same without
noise. The noise is a hash of ``(seed, p, v)``, so the token depends on the logits, the seed and the position alone: not
on the drafter, the batch, or earlier computations.

Proof that the argmax is a sample: with ``u`` uniform, Gumbel noise is ``-log(-log u)``, so the argmax of ``log p(v) +
noise(v)`` is the argmin of ``-log u(v) / p(v)``. These are exponential variables of rates ``p(v)``, and the smallest of
them is at ``v`` with probability ``p(v) / Σ p``.

The *rejection* and *block* rules (:mod:`pronk.sampling.verify`) sample the same distribution with separate numbers, and
their tokens depend on the draft tokens.
"""

from __future__ import annotations

import hashlib
import secrets
from array import array
from collections.abc import Sequence

import torch
from torch import Tensor

from pronk.sampling.params import MAX_SEED

__all__ = [
    "block_uniform",
    "derive_seed",
    "draft_noise",
    "gumbel_noise",
    "noise_key",
    "random_seed",
    "rejection_noise",
    "rejection_uniform",
    "seed_key",
    "trial_seed",
]


def random_seed() -> int:
    """Return a random 32-bit seed, short enough to be typed again."""
    return secrets.randbits(32)


def derive_seed(seed: int, sample: int) -> int:
    """Return the seed of sample number ``sample`` of a request; sample 0 keeps the request's seed."""
    return seed if sample == 0 else _mix(_mix(seed) + sample) & 0xFFFFFFFF


# SplitMix64 (Steele, Lea & Flood 2014): its increment and the two multipliers of its finalizer.
_INCREMENT = 0x9E3779B97F4A7C15
_MULTIPLIER_1 = 0xBF58476D1CE4E5B9
_MULTIPLIER_2 = 0x94D049BB133111EB
_MASK = 2**64 - 1


def _mix(x: int) -> int:
    x &= _MASK
    x = (x ^ (x >> 30)) * _MULTIPLIER_1 & _MASK
    x = (x ^ (x >> 27)) * _MULTIPLIER_2 & _MASK
    return x ^ (x >> 31)


def _signed(x: int) -> int:
    """Return the int64 with the same bits; torch's int64 products and sums are modulo 2**64 too."""
    return x - 2**64 if x >= 2**63 else x


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Shift int64 right logically; torch's own shift repeats the sign bit."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def seed_key(seed: int) -> int:
    """Return the hash of a seed, in [0, 2**64); input of :func:`noise_key`."""
    return _mix(seed)


def noise_key(seed: int, position: int) -> int:
    """Return the hash of seed and position, in [0, 2**64); the noise hashes this key with the token."""
    return _mix(seed_key(seed) + position * _INCREMENT)


def gumbel_noise(seed: int, position: int, tokens: Tensor) -> Tensor:
    """Return standard Gumbel noise for ``tokens`` (int64, any shape) at a position: float64, same shape.

    A pure function of its arguments on every device, up to the last bit of the device's logarithm.
    """
    key = noise_key(seed, position)
    x = tokens * _signed(_INCREMENT) + _signed(key)
    x = (x ^ _shift_right(x, 30)) * _signed(_MULTIPLIER_1)
    x = (x ^ _shift_right(x, 27)) * _signed(_MULTIPLIER_2)
    x = x ^ _shift_right(x, 31)
    # 52 random bits plus one half: exact in float64, and never 0 or 1.
    uniform = (_shift_right(x, 12).to(torch.float64) + 0.5) * 2.0**-52
    return uniform.log_().neg_().log_().neg_()


# Offset that turns a request's seed into one that no request can have, so that the trials of the rejection and block
# rules never share numbers with a drafter. "Token" ids >= 0 belong to the draw after the last rejection, ids from -1
# down to trials of single draft tokens, ids from -1 - 2**32 down to trials of chains.
_REJECTION = MAX_SEED + 1
_CHAINS = 2**32


def trial_seed(seed: int, prompt: Sequence[int]) -> int:
    """Return the seed of the trials of one request under the rejection and block rules, in [0, 2**63).

    The seed depends on the prompt. If two requests of a batch had the same trial numbers at the same positions, then
    the draft length of one request, which depends on the acceptance of the other, would depend on numbers that it has
    yet to draw.
    """
    digest = hashlib.blake2b(array("q", prompt).tobytes(), digest_size=8).digest()
    return _mix(_mix(seed) ^ int.from_bytes(digest, "little")) & MAX_SEED


def rejection_uniform(seed: int, position: int, trial: int) -> float:
    """Return the uniform number in [0, 1) for trial number ``trial`` at a position.

    A pure function of its arguments: the hash at "token" ``-1 - trial``, which :func:`rejection_noise` does not use.
    """
    key = noise_key(seed + _REJECTION, position)
    return (_mix(key - (trial + 1) * _INCREMENT) >> 11) * 2.0**-53


def rejection_noise(seed: int, position: int, tokens: Tensor) -> Tensor:
    """Return the :func:`gumbel_noise` for the draw after all draft tokens at a position were rejected.

    It is independent of the trials of these draft tokens.
    """
    return gumbel_noise(seed + _REJECTION, position, tokens)


def block_uniform(seed: int, position: int, index: int) -> float:
    """Return the uniform number in [0, 1) for the trial of a chain's first ``index`` draft tokens.

    ``position`` is that of the chain's first token. The numbers are separate from :func:`rejection_uniform`: draft
    token 3 of a chain that begins at position 5 is for position 7, and after its rejection a chain of the next step may
    begin at 7.
    """
    return rejection_uniform(seed, position, _CHAINS + index)


# Seed offset for the draws of drafters under the rejection and block rules.
_DRAFT = 3 * 2**62


def draft_noise(seed: int, root: int, position: int, tokens: Tensor) -> Tensor:
    """Return the :func:`gumbel_noise` for a drafter's own draw under the rejection and block rules.

    ``root`` is the position of the step's last committed token. It differs between steps, so no noise is used in two
    steps.
    """
    return gumbel_noise(_mix(seed + _DRAFT) + root * _INCREMENT, position, tokens)
