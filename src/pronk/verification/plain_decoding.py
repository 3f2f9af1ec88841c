"""The reference: the target model's logits after a given text, from a plain prefill of this text.

No draft tokens take part, so the reference shares the model with the text under test, but not the verification of
draft tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from pronk.engine.request import Request
from pronk.llm import LLM
from pronk.sampling.params import SamplingParams
from pronk.sampling.sampler import Sampler

__all__ = ["Recorder", "rounding", "score_next"]


class Recorder(Sampler):
    """A sampler that keeps the logits ``[vocab]`` (float32) of its last choice."""

    logits: Tensor

    def choose(self, logits: Tensor) -> int:
        """Return the target's token and keep the logits."""
        self.logits = logits.float().clone()
        return super().choose(logits)

    def could_choose(self, token: int, instead_of: int, slack: float) -> bool:
        """Return whether changing every logit by at most ``slack`` can make ``token`` the choice.

        Two changes suffice: ``token`` up and all others down; and ``instead_of`` down and all others up, because
        truncation such as top-p may then drop ``instead_of``.
        """
        token_up, other_down = self.logits - slack, self.logits + slack
        token_up[token] = self.logits[token] + slack
        other_down[instead_of] = self.logits[instead_of] - slack
        return any(Sampler.choose(self, logits) == token for logits in (token_up, other_down))


def score_next(
    llm: LLM, prompt: Sequence[int], outputs: Sequence[Sequence[int]], params: SamplingParams
) -> list[Recorder]:
    """Return the logits after ``prompt`` and each of ``outputs``, each in a sampler with ``params``."""
    plain = llm.get_proposer("autoregressive")

    def after(output: Sequence[int]) -> Request:
        options = replace(params, max_tokens=len(output) + 1, logprobs=None, prompt_logprobs=None, rule="coupled")
        return llm.request_factory.create_request(
            prompt, options, plain, seed=params.seed or 0, output=output, sampler=Recorder
        )

    requests = [after(output) for output in outputs]
    llm.engine.run(requests)
    recorders = []
    for request, output in zip(requests, outputs, strict=True):
        recorder = after(output).sampler  # a new sampler, as that of the request has advanced by one token
        assert isinstance(recorder, Recorder)
        assert isinstance(request.sampler, Recorder)
        recorder.logits = request.sampler.logits
        recorders.append(recorder)
    return recorders


def rounding(llm: LLM, magnitude: float) -> float:
    """Return the bound on the rounding error of a logit, given the largest magnitude of its row.

    Each of the ``L`` layers adds to the residual stream twice, and the head reads it once. Each of these ``2L + 1``
    operations rounds to the dtype, with an error of at most the unit roundoff ``u`` times the magnitude (half a unit in
    the last place). Independent errors add up as a random walk::

        u × magnitude × sqrt(2L + 1)

    For ``pronk-tiny`` in bfloat16 (L = 8) this is 2.1 units in the last place. The measured error of the torch path,
    compared with float32, is 0.28 in the root mean square and 1.9 at most.
    """
    unit = torch.finfo(llm.dtype).eps / 2
    return unit * magnitude * math.sqrt(2 * llm.config.num_layers + 1)
