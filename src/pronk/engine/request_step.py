"""One request's part of a step: its rows in the forward pass, and the verification of its draft.

Draft node 0 is the last token of the text. During prefill, rows of earlier prompt tokens precede node 0.
"""

from __future__ import annotations

from typing import NamedTuple

from pronk.arrays import Array, is_finite
from pronk.engine.request import Request
from pronk.engine.scheduler import ScheduledRequest
from pronk.execution.forward_job import ForwardJob, Segment
from pronk.execution.model_runner import JobResult, ModelRunner
from pronk.sampling.acceptance import acceptance_rule
from pronk.sampling.sampler import NotFiniteError
from pronk.sampling.stateless import Logits
from pronk.sampling.verify import VerifiedPath, verify_tree
from pronk.speculation.tree import TokenTree


class RequestStep(NamedTuple):
    """One request's rows in the forward pass of a step."""

    scheduled: ScheduledRequest  # the request and its number of pending tokens in the forward pass
    draft: TokenTree  # tree to verify: last pending token (the root) and the draft tokens, if any
    job: ForwardJob  # input of the forward pass: rows of the pending tokens, then of the draft tokens

    @property
    def request(self) -> Request:
        """Request that the rows belong to."""
        return self.scheduled.request

    @property
    def root_row(self) -> int:
        """Index of the row of the draft's root; rows of earlier pending tokens come before."""
        return len(self.job.segment.tree) - len(self.draft)

    def source(self, node: int) -> str:
        """Return the name of the drafter that proposed a node of the draft."""
        if self.draft.origin is not None:
            return self.draft.origin[node][0]
        return "" if self.request.proposer is None else self.request.proposer.name


class VerifiedStep(NamedTuple):
    """A request's step after the verification of its draft."""

    step: RequestStep
    prompt_logits: Array  # logits ``[rows, vocab]`` of rows before the root, for ``prompt_logprobs``
    logits: Logits  # logits ``[nodes, vocab]`` of the draft's nodes, root included
    result: JobResult  # output of the forward pass for this request
    path: VerifiedPath | None  # accepted nodes and sampled tokens; ``None`` during prefill, and for an embedding


def plan_step(scheduled: ScheduledRequest, draft: TokenTree | None, runner: ModelRunner) -> RequestStep:
    """Return a request's rows in the next forward pass; the scheduler has reserved their KV slots."""
    request, block_table = scheduled.request, scheduled.request.block_table
    pending = request.tokens[block_table.length : block_table.length + scheduled.num_tokens]
    draft = draft or TokenTree.chain(pending[-1:])
    tree = draft if scheduled.num_tokens == 1 else TokenTree.chain(pending)
    samples = scheduled.includes_last_token and request.pooler is None
    first = len(tree) - len(draft) if samples else len(tree)
    all_logits = request.computes_prompt_logprobs or request.params.rejects or request.needs_logits
    job = ForwardJob(
        Segment(block_table, tree, early=runner.early_rows(block_table, tree, request.hidden_layers)),
        range(0 if request.computes_prompt_logprobs else first, len(tree)),
        len(request.prompt),
        all_logits=all_logits,
        stateless_sampler=None if all_logits else request.sampler.stateless_sampler,
    )
    return RequestStep(scheduled, draft, job)


def verify(step: RequestStep, result: JobResult) -> VerifiedStep:
    """Verify one request's draft against the logits of the target.

    The sampler advances past the sampled tokens; :meth:`~pronk.engine.output_processor.OutputProcessor.commit` appends
    them to the text. Raises ``NotFiniteError`` if logits needed for sampling are infinite or NaN, ``OptionError`` if
    the request's options ban every token.
    """
    request, logits = step.request, result.logits
    if request.pooler is not None:
        return VerifiedStep(step, logits[:], logits, result, None)
    num_prompt_rows = len(logits) - (len(step.draft) if step.scheduled.includes_last_token else 0)
    prompt_logits, logits = logits[:num_prompt_rows], logits[num_prompt_rows:] if num_prompt_rows else logits
    _check_finite(prompt_logits)
    # The coupled rule reads only the logits along the accepted path: verify_tree checks these, and others may be
    # infinite. The rejection rules depend on the logits of every draft token: check all.
    if request.params.rejects:
        _check_finite(logits[:])
    if not step.scheduled.includes_last_token:
        return VerifiedStep(step, prompt_logits, logits, result, None)
    request.sampler.recover()  # an interrupted step may have left the sampler beyond the text's end
    path = verify_tree(step.draft, acceptance_rule(request.sampler, step.draft, logits, result.sampled))
    return VerifiedStep(step, prompt_logits, logits, result, path)


def _check_finite(logits: Array) -> None:
    if len(logits) and not is_finite(logits):
        raise NotFiniteError
