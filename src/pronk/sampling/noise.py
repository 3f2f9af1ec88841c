"""Random numbers for sampling: hashes of seed, position and token.

By the *coupled* rule, the target's token at a position is ::

    argmax over tokens v of  log p(v) + Gumbel noise(seed, position, v)

with p the target's distribution after logits processors, temperature and truncation. This token is
a sample of p (Gumbel 1954; Maddison et al. 2014). Greedy decoding is the same formula without
noise. The noise is a hash of ``(seed, position, v)``, so the token depends on the logits, the seed
and the position alone: not on the drafter, the batch, or earlier computations.

Proof that the argmax is a sample: with ``u`` uniform, Gumbel noise is ``-log(-log u)``, so the
argmax of ``log p(v) + noise(v)`` is the argmin of ``-log u(v) / p(v)``. These are exponential
variables of rates ``p(v)``, and the smallest of them is at ``v`` with probability ``p(v) / Σ p``.
"""

from __future__ import annotations

import hashlib
import secrets
from array import array
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from pronk.base.arrays import Array
from pronk.kernels.exact_math import replace_by_log
from pronk.sampling.params import MAX_SEED


def random_seed() -> int:
    """Return a random seed of 32 bits, which a user can type to repeat a result."""
    return secrets.randbits(32)


def derive_seed(seed: int, sample: int) -> int:
    """Return the seed of sample number ``sample`` of a request; number 0 has the request's seed."""
    return seed if sample == 0 else _mix(_mix(seed) + sample) & 0xFFFFFFFF


# Constants of the hash SplitMix64 (Steele, Lea & Flood 2014): its increment, and the two
# multipliers of its finalizer.
_INCREMENT = 0x9E3779B97F4A7C15
_MULTIPLIER_1 = 0xBF58476D1CE4E5B9
_MULTIPLIER_2 = 0x94D049BB133111EB
_MASK = 2**64 - 1


def _mix(x: int) -> int:
    """Return the SplitMix64 hash of an integer, in [0, 2**64)."""
    x &= _MASK
    x = (x ^ (x >> 30)) * _MULTIPLIER_1 & _MASK
    x = (x ^ (x >> 27)) * _MULTIPLIER_2 & _MASK
    return x ^ (x >> 31)


def seed_key(seed: int) -> int:
    """Return the hash of a seed, in [0, 2**64), from which :func:`noise_key` starts."""
    return _mix(seed)


def noise_key(seed: int, position: int) -> int:
    """Return the hash of seed and position, in [0, 2**64).

    The noise of a token is a hash of this number and the token id.
    """
    return _mix(seed_key(seed) + position * _INCREMENT)


def gumbel_noise(seed: int, position: int, tokens: Array) -> NDArray[np.float64]:
    """Return standard Gumbel noise for tokens at a position.

    Equal arguments give equal noise on every processor.

    Args:
        seed: seed of the request.
        position: index of the token in the text.
        tokens: token ids, int64 of any shape.

    Returns:
        Noise, float64 of the same shape.
    """
    x = tokens.astype(np.uint64)  # in arrays of uint64, sums and products are modulo 2**64
    x *= _INCREMENT
    x += noise_key(seed, position)
    for bits, multiplier in ((30, _MULTIPLIER_1), (27, _MULTIPLIER_2)):
        x ^= x >> bits
        x *= multiplier
    x ^= x >> 31
    x >>= 12
    # 52 random bits plus one half, which float64 represents exactly; the result is never 0 or 1.
    noise = x.astype(np.float64)
    noise += 0.5
    noise *= 2.0**-52
    for _ in range(2):
        replace_by_log(noise)
        np.negative(noise, out=noise)
    return noise


# The rejection and block rules take each random number from a hash of three integers: a seed, a
# position of the text, and a third integer that says what the random number decides:
#   a token id, at least 0: the token after all draft tokens at the position were rejected;
#   -1 - trial: whether draft token number ``trial`` at the position is accepted (rejection rule);
#   -1 - _CHAINS - index: whether the first ``index`` tokens of a chain are accepted (block rule).
# The seed is the request's trial seed plus _REJECTION. No request has a seed above MAX_SEED, so no
# drafter draws its tokens with the same numbers.
_REJECTION = MAX_SEED + 1
_CHAINS = 2**32


def trial_seed(seed: int, prompt: Sequence[int]) -> int:
    """Return the seed, in [0, 2**63), of the random numbers that accept or reject draft tokens.

    The rejection and block rules use this seed. It depends on the prompt (token ids), so that
    requests with equal seeds and different prompts have different random numbers. Otherwise two
    such requests would use the same numbers, and the acceptance in one request, which affects the
    draft length of the other, would reveal numbers that the other request has yet to use.
    """
    digest = hashlib.blake2b(array("q", prompt).tobytes(), digest_size=8).digest()
    return _mix(_mix(seed) ^ int.from_bytes(digest, "little")) & MAX_SEED


def rejection_uniform(seed: int, position: int, trial: int) -> float:
    """Return the random number, uniform in [0, 1), that accepts or rejects a draft token.

    The rejection rule tries the draft tokens at ``position`` one by one; ``trial`` is the number of
    the draft token in this order, from 0. ``seed`` is that of :func:`trial_seed`.
    """
    key = noise_key(seed + _REJECTION, position)
    return (_mix(key - (trial + 1) * _INCREMENT) >> 11) * 2.0**-53


def rejection_noise(seed: int, position: int, tokens: Array) -> NDArray[np.float64]:
    """Return Gumbel noise for drawing a token after all draft tokens at a position were rejected.

    Shapes and dtypes are those of :func:`gumbel_noise`.
    """
    return gumbel_noise(seed + _REJECTION, position, tokens)


def block_uniform(seed: int, position: int, index: int) -> float:
    """Return the random number, uniform in [0, 1), for the trial of a chain's first draft tokens.

    ``position`` is the position of the chain's first token, and ``index`` the number of tokens.
    Chains of one request never begin at the same position, so no number is used twice. With each
    draft token's own position, numbers would be used twice: the third token of a chain from
    position 5 has position 7, where the next chain may begin.
    """
    return rejection_uniform(seed, position, _CHAINS + index)


# Added to the trial seed for the noise with which drafters draw tokens under the rejection and
# block rules. Verification adds _REJECTION instead, so the two never use the same numbers.
_DRAFT = 3 * 2**62


def draft_noise(seed: int, root: int, position: int, tokens: Array) -> NDArray[np.float64]:
    """Return Gumbel noise for a drafter's draw of a token under the rejection and block rules.

    ``root`` is the position of the last committed token, and ``position`` that of the token to
    draw. ``root`` differs between steps, so a token that is proposed again in a later step is drawn
    with other noise. Shapes and dtypes are those of :func:`gumbel_noise`.
    """
    return gumbel_noise(_mix(seed + _DRAFT) + root * _INCREMENT, position, tokens)
