"""The numbers that choices are made with: hashes of seed, position and token.

The target's token at position ``p`` is, by the *coupled* rule, ::

    argmax over tokens v of  processed log-probability(v) + Gumbel noise(seed, p, v)

which is a sample of the processed distribution (Gumbel 1954; Maddison et al. 2014), and for greedy decoding the
same without noise. The noise is a hash of ``(seed, p, v)``, so the emitted token depends on the logits, the seed and
the position alone: not on the drafter, the batch, or what was computed before.

The other two rules, *rejection* and *block* (:mod:`pronk.sampling.verify`), draw from the same distribution with numbers
of their own, and look at the guesses. Why the argmax is a sample: with ``u`` uniform, Gumbel noise is
``-log(-log u)``, so the argmax of ``log p(v) + noise(v)`` is the argmin of ``-log u(v) / p(v)``. Those are exponential
variables of rates ``p(v)``, and the first of them is ``v`` with probability ``p(v) / Σ p``.
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
    "fresh_seed",
    "gumbel_noise",
    "noise_key",
    "rejection_noise",
    "rejection_uniform",
    "seed_key",
    "trial_seed",
]


def fresh_seed() -> int:
    """A seed for a request that has none, short enough to be typed again."""
    return secrets.randbits(32)


def derive_seed(seed: int, sample: int) -> int:
    """The seed of a request's sample number ``sample``; sample 0 keeps the request's own."""
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
    """The int64 with the same bits; torch's own products and sums are modulo 2**64 as well."""
    return x - 2**64 if x >= 2**63 else x


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Logical shift of int64, whose own shift repeats the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def seed_key(seed: int) -> int:
    """What a request's :func:`noise_key` is a hash of, beside the position, in [0, 2**64)."""
    return _mix(seed)


def noise_key(seed: int, position: int) -> int:
    """What the noise at a position is a hash of, beside the token, in [0, 2**64)."""
    return _mix(seed_key(seed) + position * _INCREMENT)


def gumbel_noise(seed: int, position: int, tokens: Tensor) -> Tensor:
    """Standard Gumbel noise for ``tokens`` (int64, any shape) at a position: float64 of the same shape.

    A pure function of its arguments on every device, up to the last bit of the device's logarithm.
    """
    key = noise_key(seed, position)
    x = tokens * _signed(_INCREMENT) + _signed(key)
    x = (x ^ _shift_right(x, 30)) * _signed(_MULTIPLIER_1)
    x = (x ^ _shift_right(x, 27)) * _signed(_MULTIPLIER_2)
    x = x ^ _shift_right(x, 31)
    # 52 random bits and a half, which float64 holds exactly, so that neither 0 nor 1 occurs.
    uniform = (_shift_right(x, 12).to(torch.float64) + 0.5) * 2.0**-52
    return uniform.log_().neg_().log_().neg_()


# Added to a seed, it gives one that no request has: the numbers of the rules that reject are none of those that a
# drafter may have drawn its guesses with. Among them, "tokens" from 0 on are for the draw after the last rejection,
# those from -1 down for single guesses, and those from -1 - 2**32 down for chains.
_REJECTION = MAX_SEED + 1
_CHAINS = 2**32


def trial_seed(seed: int, prompt: Sequence[int]) -> int:
    """The seed of a request's own numbers where guesses are accepted by chance, in [0, 2**63).

    How much is guessed for a request depends on how its neighbours in the batch fare. If they had a seed in common, and
    so the same numbers at the same positions, it would depend on numbers that the request has yet to draw.
    """
    digest = hashlib.blake2b(array("q", prompt).tobytes(), digest_size=8).digest()
    return _mix(_mix(seed) ^ int.from_bytes(digest, "little")) & MAX_SEED


def rejection_uniform(seed: int, position: int, trial: int) -> float:
    """A number in [0, 1) for the trial of guess number ``trial`` at a position; a pure function of its arguments.

    It is the hash at "token" ``-1 - trial``, which :func:`rejection_noise` has no use for.
    """
    key = noise_key(seed + _REJECTION, position)
    return (_mix(key - (trial + 1) * _INCREMENT) >> 11) * 2.0**-53


def rejection_noise(seed: int, position: int, tokens: Tensor) -> Tensor:
    """:func:`gumbel_noise` for the draw after all guesses at a position were rejected, independent of their trials."""
    return gumbel_noise(seed + _REJECTION, position, tokens)


def block_uniform(seed: int, position: int, index: int) -> float:
    """A number in [0, 1) for the trial of the first ``index`` guesses of a chain that begins at a position.

    It is none of :func:`rejection_uniform`'s: of a chain that begins at position 5, guess number 3 is the one for
    position 7, and if it is rejected a chain of the next step may begin there.
    """
    return rejection_uniform(seed, position, _CHAINS + index)


# The same for what a drafter draws where guesses are accepted by chance.
_DRAFT = 3 * 2**62


def draft_noise(seed: int, root: int, position: int, tokens: Tensor) -> Tensor:
    """:func:`gumbel_noise` for a drafter's own draw at a position, in the step whose last certain token is at ``root``.

    Each step has a root of its own: noise that was looked at in a step is never used again.
    """
    return gumbel_noise(_mix(seed + _DRAFT) + root * _INCREMENT, position, tokens)
