"""The reference: the target model's logits after a given text, from a plain prefill of this text.

The reference involves no draft tokens, so a defect in their verification cannot affect it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from pronk import LLM, SamplingParams
from pronk.base.arrays import Array
from pronk.drafting import Sampler
from pronk.serving import Request


class LogitsRecorder(Sampler):
    """A sampler that records the target's logits of its latest choice."""

    logits: NDArray[np.float32]  # float32 ``[vocab]``, of the latest choice

    def __init__(self, *args: Any, **options: Any) -> None:
        """Create a sampler; the arguments are those of :class:`Sampler`."""
        super().__init__(*args, **options)
        self.library_sampler = None  # so that every token is chosen by :meth:`choose`

    def choose(self, logits: Array) -> int:
        """Return the token that the target chooses, and record the logits."""
        self.logits = np.array(logits, np.float32)
        return super().choose(logits)

    def could_choose(self, token: int, instead_of: int, slack: float) -> bool:
        """Return whether changing every logit by at most ``slack`` can make ``token`` the choice.

        Two changes are tested. The first raises the logit of ``token`` and lowers all others. The
        second lowers the logit of ``instead_of`` and raises all others, because truncation such as
        top-p may then remove ``instead_of``. True is certain; False may rarely be wrong.
        """
        token_up = self.logits - slack
        other_down = self.logits + slack
        token_up[token] = self.logits[token] + slack
        other_down[instead_of] = self.logits[instead_of] - slack
        return any(Sampler.choose(self, logits) == token for logits in (token_up, other_down))


def score_next(
    llm: LLM, prompt: Sequence[int], outputs: Sequence[Sequence[int]], params: SamplingParams
) -> list[LogitsRecorder]:
    """Return samplers with the target's logits after each of several texts.

    ``outputs`` has the token ids of each text generated after ``prompt``, and ``params`` the
    sampling options. The sampler of a text is in the state after the text; its attribute ``logits``
    has the logits of the next token.
    """
    plain = llm.get_proposer("autoregressive")

    def request_after(output: Sequence[int]) -> Request:
        # Only the rule "coupled" calls ``choose``, which records the logits. A missing seed counts
        # as 0.
        options = replace(
            params, max_tokens=len(output) + 1, logprobs=None, prompt_logprobs=None, rule="coupled"
        )
        return llm.request_factory.create_request(
            prompt, options, plain, seed=params.seed or 0, output=output, sampler=LogitsRecorder
        )

    requests = [request_after(output) for output in outputs]
    llm.engine.run(requests)
    recorders = []
    for request, output in zip(requests, outputs, strict=True):
        # A new sampler, because ``request.sampler`` is one token further.
        recorder = request_after(output).sampler
        assert isinstance(recorder, LogitsRecorder)
        assert isinstance(request.sampler, LogitsRecorder)
        recorder.logits = request.sampler.logits
        recorders.append(recorder)
    return recorders


def rounding(llm: LLM, magnitude: float) -> float:
    """Estimate the rounding error of a logit; ``magnitude`` is the largest absolute logit.

    Each of the ``L`` layers adds to the residual stream twice, and the LM head reads it once. Each
    of these operations rounds with an error of at most ``u × magnitude``, where the unit roundoff
    ``u`` is half an ulp of 1. Independent errors add up as a random walk: ``u × magnitude × sqrt(2L
    + 1)``. For ``pronk-tiny`` in bfloat16 (L = 8) this is 2.1 ulp. The measured error of the
    PyTorch kernels has a root mean square of 0.28 ulp and a maximum of 1.9 ulp.
    """
    unit_roundoff = float(ml_dtypes.finfo(llm.dtype).eps) / 2  # type: ignore[no-untyped-call]
    return unit_roundoff * magnitude * math.sqrt(2 * llm.config.num_layers + 1)
