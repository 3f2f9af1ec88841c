"""Digests of a model's outputs, which are equal on every processor, and citations of results.

::

    from pronk.reproducibility import current, digests, model_hash, published_digests

    llm = LLM("smollm2", bits="portable")
    digests(llm) == current(published_digests(model_hash(llm.path)))
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields
from hashlib import blake2b
from typing import Any

import numpy as np

import pronk
from pronk.base.errors import OptionError, refuse
from pronk.checkpoint.hub.digests import DigestHistory, digests_line, model_hash, published_digests
from pronk.llm import LLM
from pronk.sampling.params import SamplingParams

__all__ = [
    "PARAMS",
    "citation",
    "current",
    "digests",
    "digests_line",
    "model_hash",
    "published_digests",
]

_NUM_TOKENS = 64
_PROMPT = [*range(20, 44), *range(30, 60)]  # token ids that every vocabulary has

# Options of the sampled texts. Log-probabilities are part of a digest. High temperatures, because
# some random models are almost sure of each token.
PARAMS = {
    "greedy": SamplingParams(max_tokens=_NUM_TOKENS, ignore_eos=True, logprobs=3),
    "noise": SamplingParams(
        max_tokens=_NUM_TOKENS, ignore_eos=True, logprobs=3, temperature=5.0, seed=7
    ),
    "truncated": SamplingParams(
        max_tokens=_NUM_TOKENS,
        ignore_eos=True,
        temperature=3.0,
        seed=8,
        top_p=0.9,
        min_p=0.01,
        repetition_penalty=1.1,
        frequency_penalty=0.2,
        presence_penalty=0.1,
    ),
}
# Options on which the text does not depend.
_WITHOUT_EFFECT = frozenset({"prediction"})
_SCORED = SamplingParams(max_tokens=1, prompt_logprobs=64)


def digests(llm: LLM) -> dict[str, str]:
    """Return digests of a model's outputs, which depend on the model and ``pronk.BITS`` alone.

    Returns:
        16 hexadecimal digits for each text: ``"text"`` covers the 64 largest log-probabilities at
        each position of a fixed text of 54 tokens; each key of :data:`PARAMS` covers the 64 tokens
        that these options sample after it, and their log-probabilities. Log-probabilities are
        rounded to float32.

    Raises:
        OptionError: the model does not compute portable bits.
    """
    if llm.bits != "portable":
        hint = 'load the model with bits="portable"'
        msg = f'expected "portable", found "{llm.bits}" with {llm.kernels}; {hint}'
        refuse("bits", msg, OptionError)
    params = [_SCORED, *PARAMS.values()]
    (scored, *sampled) = llm.generate([_PROMPT] * len(params), params, drafter="autoregressive")
    found = {"text": _digest(scored.prompt_logprobs or ())}
    for name, completion in zip(PARAMS, sampled, strict=True):
        tokens = [{token: 0.0} for token in completion.token_ids]
        found[name] = _digest([*tokens, *(completion.logprobs or ())])
    return found


def _digest(reports: Iterable[Mapping[int, float] | None]) -> str:
    """Return a digest of token ids and log-probabilities, which are rounded to float32."""
    digest = blake2b(digest_size=8)
    for report in reports:
        for token, logprob in (report or {}).items():
            digest.update(token.to_bytes(4, "little") + np.float32(logprob).tobytes())
    return digest.hexdigest()


def current(history: DigestHistory) -> dict[str, str]:
    """Return the digests that hold for this ``pronk.BITS``; empty if none is known.

    A value of ``pronk.BITS`` without digests of its own has those of the last value before it.
    """
    known = [bits for bits in map(int, history) if bits <= pronk.BITS]
    return {**history[str(max(known))]} if known else {}


def citation(
    llm: LLM, params: SamplingParams, options: Mapping[str, Any], adapter: str | None = None
) -> str:
    """Return one line with all, besides the prompt, that another needs to repeat a result.

    Args:
        llm: model of the result.
        params: options of the request; ``seed`` is that of the result.
        options: arguments of :class:`pronk.LLM` with which ``llm`` was created; of them,
            ``weights`` and the number of tensor-parallel ``workers`` are cited.
        adapter: name of the request's adapter.
    """
    given = [
        f"{each.name}={getattr(params, each.name)!r}"
        for each in fields(params)
        if each.name not in _WITHOUT_EFFECT and getattr(params, each.name) != each.default
    ]
    settings: dict[str, object] = {
        "bits": llm.bits if llm.bits == "portable" else f"{llm.bits} ({llm.kernels})",
        "dtype": llm.dtype,
        "kv_dtype": llm.engine.cache.kv_dtype,
        "weights": options.get("weights", "plain"),
    }
    if options.get("parallel") == "tensor":
        settings["workers"] = options["workers"]
    if adapter is not None:
        settings["adapter"] = llm.adapters[adapter].digest.hex()
    shown = ", ".join(f"{name} {value}" for (name, value) in settings.items())
    model = f"model {llm.path.name} SHA-256 {model_hash(llm.path)}"
    return f"pronk {pronk.__version__}, BITS {pronk.BITS}; {model}; {shown}; {', '.join(given)}"
