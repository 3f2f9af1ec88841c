"""The judge: the model's logits after a given text, from one plain pass over it.

No guess takes part in such a pass, and the tokens go through it as a prompt does, so it shares with what it judges
the model and nothing of the step that verifies guesses.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from pronk.choosing.chooser import Chooser
from pronk.choosing.params import SamplingParams, gumbel_noise
from pronk.drafters import Autoregressive, Drafter
from pronk.engine.request import Request, end_ids
from pronk.llm import LLM
from pronk.text.stream import TextStream

__all__ = ["Recorder", "continuation", "rounding", "run", "score_next"]


class Recorder(Chooser):
    """A chooser that keeps the logits it chose from.

    Attributes:
        logits: ``[vocab]`` float32, of the last choice.
    """

    logits: Tensor

    def choose(self, logits: Tensor) -> int:
        """The target's token; the logits are kept."""
        self.logits = logits.float().clone()
        return super().choose(logits)

    def scores(self) -> Tensor:
        """``[vocab]`` float64: what the choice is the argmax of, the coupled noise included; -inf where truncated."""
        shaped = self._shape(self.logits) if self.params.shapes_logits else self.logits
        if self.params.greedy:
            return shaped.double()
        kept, ids = self._truncate(shaped / self.params.temperature)
        noise = gumbel_noise(self.seed, len(self.context), ids)
        scores = torch.full((len(self.logits),), -math.inf, dtype=torch.float64)
        scores[ids] = kept.double() + noise
        return scores

    def could_choose(self, token: int, instead_of: int, slack: float) -> bool:
        """Whether moving every logit by at most ``slack`` can make ``token`` the choice.

        Two of the moves are the best there are: ``token`` up and all others down, and, because truncation may drop
        the rival, the rival down and all others up.
        """
        up, down = self.logits - slack, self.logits + slack
        up[token] = self.logits[token] + slack
        down[instead_of] = self.logits[instead_of] - slack
        return any(Chooser.choose(self, logits) == token for logits in (up, down))


def continuation(
    llm: LLM,
    prompt: Sequence[int],
    params: SamplingParams,
    *,
    chooser: type[Chooser] = Chooser,
    drafter: Drafter[Any] | None = None,
    output: Sequence[int] = (),
    parent: Request | None = None,
) -> Request:
    """A request that goes on after ``prompt`` and ``output``; ``params.max_tokens`` counts the output as well.

    ``drafter`` must have met the target. With a ``parent`` that has the same prompt and still runs, the request
    starts from the parent's cache.
    """
    seed = params.seed or 0
    ends = end_ids(params, llm.config.eos_ids)
    kernels = llm.engine.runner.decoder.kernels
    own = chooser(params, seed, prompt, llm.config.vocab_size, ends=sorted(ends), kernels=kernels)
    text = TextStream(llm.tokenizer, prompt, ())
    request = Request(list(prompt), params, seed, drafter or Autoregressive(), own, text, ends, parent)
    request.tokens += output
    for token in output:
        own.advance(token)
    return request


def run(llm: LLM, requests: Sequence[Request]) -> None:
    """Run the requests to their end.

    Raises:
        PronkError: the model cannot answer one of them.
    """
    try:
        for request in requests:
            llm.engine.add(request)
        while not all(request.ended for request in requests):
            llm.engine.step()
    finally:
        for request in requests:
            llm.engine.abort(request)
    for request in requests:
        if request.error is not None:
            raise request.error


def score_next(
    llm: LLM, prompt: Sequence[int], outputs: Sequence[Sequence[int]], params: SamplingParams
) -> list[Recorder]:
    """What plain decoding sees after ``prompt`` and each of ``outputs``, under the request's options and seed."""
    requests = []
    for output in outputs:
        length = len(output) + 1
        options = replace(params, max_tokens=length, logprobs=None, prompt_logprobs=None, rule="coupled")
        requests.append(continuation(llm, prompt, options, chooser=Recorder, output=output))
    run(llm, requests)
    recorders = []
    for request in requests:
        assert isinstance(request.chooser, Recorder)
        request.chooser.rollback(1)  # the token that was chosen
        recorders.append(request.chooser)
    return recorders


def rounding(llm: LLM, magnitude: float) -> float:
    """How far rounding may move one logit between two ways to compute it, given the largest of its row.

    Each of the ``L`` layers adds to the residual stream twice, and the head reads it once. Each of these ``2L + 1``
    operations rounds to the dtype, which moves the result by at most its unit roundoff ``u`` of the magnitude (half
    a unit in the last place). The roundings are independent, so they add up as a random walk does::

        u × magnitude × sqrt(2L + 1)

    Of the bundled model in bfloat16 (L = 8) this is 2.1 units in the last place, against a measured error (compared
    with float32) of torch's path of 0.28 in the root mean square and 1.9 at most.
    """
    unit = torch.finfo(llm.dtype).eps / 2
    return unit * magnitude * math.sqrt(2 * llm.config.num_layers + 1)
