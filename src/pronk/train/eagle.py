"""Training of an EAGLE-3 or MTP head on dialogues of the target, with training-time test.

Let ``t`` be the tokens of a text, and ``f`` the target's features. A row of the head learns the
target's distribution after a token from two inputs::

    step    inputs of row i                                      distribution after
    0       f[i], embedding of t[i + 1]                          t[i + 1]
    s       output of row i in step s - 1, embedding of t[i+1+s] t[i + 1 + s]

Step ``s`` computes what the head computes in decoding for its draft token number ``s + 1``
(:mod:`pronk.train.attention`). Only rows whose draft tokens are within an answer are trained; the
other rows serve as keys and values only. All trained rows have step 0, and a random fraction of
them, ``chains``, has the later steps. For all rows, each later step would cost about as much as the
first one; the first draft token matters most, because a later one counts only if it is accepted.

The loss of a step is the divergence from the target's distribution, restricted to the draft
vocabulary. Rows for which the target's likeliest token is not in the draft vocabulary are left out.
An MTP head proposes all tokens by the target's own LM head, which is not trained, so for it the
restriction only makes the training cheaper.

The features come from the target as it is served, quantized or not
(:mod:`pronk.train.target_states`). The target's distributions are computed from the output of its
last layer and its dequantized LM head. Only the engine computes the target's layers, so that they
may be of any kind, such as recurrent ones.

With the option ``bits``, forward and backward passes have rounded weights
(:mod:`pronk.train.quantization.straight_through`), and so has the exported head.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from pronk.base import replace_folder
from pronk.drafting import ACCEPTANCE_FILE, head_acceptance_document
from pronk.train.attention import ChainAttention
from pronk.train.checkpoint import CHECKPOINT
from pronk.train.clock import limit_time
from pronk.train.dialogues import ANSWERS, Dialogues, Mark, read_head_text, split_dialogues
from pronk.train.export import export_tensors
from pronk.train.head_plan import (
    begin_linear,
    check_answers,
    coverage,
    draft_vocabulary,
    head_config,
)
from pronk.train.initial_head import InitialHead
from pronk.train.loop import Objective, PassResult, find_device
from pronk.train.losses import Comparison, autocast, distillation_loss, product_dtype
from pronk.train.modules.decoder import load_ends, scale_logits
from pronk.train.modules.eagle import EagleModule
from pronk.train.options import EagleOptions
from pronk.train.quantization.heads import quantize_head
from pronk.train.quantization.straight_through import StraightThrough
from pronk.train.target_states import StateSource
from pronk.train.teacher import Teacher

_QUESTIONS = 24  # number of held-out questions that the engine answers to measure the head
# The acceptance of a draft position is a running mean over forward passes; this is the weight of
# the earlier mean in the new one.
_MEMORY = 0.98


class _Rows(Comparison):
    """Comparison that also saves each row's probability of acceptance and likeliest token."""

    def __init__(self) -> None:
        super().__init__()
        # for each chunk of rows: acceptance of each row, the sum of min(p, q)
        self.overlaps: list[Tensor] = []
        # for each chunk of rows: the likeliest token of each row, by the head
        self.likeliest: list[Tensor] = []

    def add(self, log_p: Tensor, log_q: Tensor, divergence: Tensor) -> None:
        super().add(log_p, log_q, divergence)
        self.overlaps.append(torch.minimum(log_p, log_q).exp().sum(-1))
        self.likeliest.append(log_q.argmax(-1))


@dataclass(frozen=True)
class _Batch:
    """Rows of all dialogues in a batch, one dialogue after the other.

    A row stands for a position of a dialogue at which the head begins to draft. A *target row* is a
    row of ``logits``: the target's distribution at a position that is learned.
    """

    hidden: Tensor  # ``[rows, sources * size]``, outputs of the target's layers, side by side
    ids: Tensor  # token ids of all dialogues; each dialogue has two more than rows
    tokens: Tensor  # ``[rows]``, index in ``ids`` of the token after the row's position
    positions: Tensor  # ``[rows]``, position of the row in its dialogue, from 0
    active: Tensor  # indices of the rows that draft tokens of an answer
    # ``[active]``, number of tokens of the answer that follow, the first draft token included
    rest: Tensor
    # ``[active]``, index in ``logits`` of the target's distribution of the first draft token
    teacher: Tensor
    logits: Tensor  # ``[targets, draft_vocab]``, the target's logits for the draft vocabulary
    # indices, among the active rows, of those that draft further tokens after their first one
    chained: Tensor
    inside: Tensor  # ``[targets]``, whether the target's likeliest token is in the draft vocabulary
    greedy: Tensor  # ``[active]``, whether the answer was generated greedily, not sampled
    attend: ChainAttention
    chains: float  # expected fraction of the active rows that are chained


class _Step(NamedTuple):
    """One step of training-time test: the output of the head for one draft position.

    Rows are selected if their draft token is within the answer, and the target's likeliest token is
    in the draft vocabulary.
    """

    number: int
    num_rows: float  # expected number of rows of the step, selected or not
    normed: Tensor  # ``[selected, size]``, input of the LM head
    selected: Tensor  # indices of the selected rows among the active rows
    # ``[selected]``, index in ``_Batch.logits`` of the distribution that a row learns
    teacher: Tensor


class EagleTraining(Objective[EagleModule]):
    """Training objective of an EAGLE-3 or MTP head.

    Raises OptionError if the dialogues are those of another model, or have no answers.
    """

    options: EagleOptions

    def __init__(self, folder: Path, options: EagleOptions, teacher: Teacher) -> None:
        self.folder = folder
        self.options = options
        self.teacher = teacher
        self.device = find_device(options.device)
        self.dialogues = read_head_text(folder, options.tokens)
        check_answers(folder / ANSWERS, self.dialogues.header.weights, teacher.fingerprint)
        training = self.dialogues.training
        self.text = Dialogues(training, options.length, options.seed)
        self.phases = self.text, self.text
        config = teacher.llm.config
        self.config = head_config(config, options, teacher.name, teacher.fingerprint)
        self.sources = self.config.sources_of(config.num_layers)
        draft_ids = draft_vocabulary(training, options.draft_vocab, config.vocab_size)
        self.coverage = coverage(self.dialogues.own, draft_ids)
        self.module = EagleModule(self.config, len(self.sources), draft_ids, options.depth)
        target = load_ends(teacher.folder, config, torch.bfloat16, torch.device("cpu"))
        self._embedding = target.embedding.detach().to(self.device)
        self._head = target.head.get_parameter("weight").detach()[draft_ids].to(self.device)
        norm = target.norm.float()
        self.states = StateSource(
            teacher.llm.target, self.sources, norm, teacher.fingerprint.weights, options.states
        )
        generator = torch.Generator().manual_seed(options.seed)
        self.module.initialize(target, generator)
        if (folder / CHECKPOINT).exists():
            pass  # a resumed run gets its weights from the checkpoint
        elif options.init is not None:
            head = InitialHead(Path(options.init), options.kind)
            head.copy_to(self.module, teacher.fingerprint, config.num_layers)
        else:
            begin_linear(self.module, target, self.states, training, options.length, generator)
        self.module.to(self.device)
        bits = options.bits
        self._quantized = None if bits is None else StraightThrough(self.module, bits)
        self.num_parameters = sum(parameter.numel() for parameter in self.module.parameters())
        self.identity = {"target": teacher.fingerprints}

    def backward(self, inputs: Tensor, targets: Tensor, scale: float) -> PassResult:
        """Add ``scale`` times the gradient of the loss of a batch.

        ``inputs`` and ``targets`` are token ids and :class:`~pronk.train.dialogues.Mark` values,
        int64 ``[count, length]``.
        """
        batch = self._prepare(inputs, targets, self.options.chains)
        if batch is None:
            return PassResult(0.0, (0.0,) * self.options.depth)
        with self._as_deployed():
            return self._backward(batch, scale)

    def _as_deployed(self) -> AbstractContextManager[None]:
        """Return the context in which the weights are rounded if the option ``bits`` says so."""
        return nullcontext() if self._quantized is None else self._quantized.rounded()

    def _backward(self, batch: _Batch, scale: float) -> PassResult:
        """Add the gradient of the loss of a batch with the weights as they are."""
        module = self.module
        weighting = self.options.weighting
        dpace = weighting == "dpace"
        factors = position_weights(weighting, self.options.decay, module.acceptance.tolist())
        # Probability, for each active row, that its draft tokens before the current step are
        # accepted.
        reached = torch.ones(len(batch.active), device=self.device)
        losses = list[Tensor]()
        same = list[float]()
        for step in self._steps(batch):
            rows = _Rows() if dpace else Comparison()
            weights = reached[step.selected]
            step_loss = self._loss(batch, step, rows, weights if dpace else None)
            losses.append(factors[step.number] * step_loss)
            if isinstance(rows, _Rows) and rows.rows:
                overlap = torch.cat(rows.overlaps)
                module.acceptance[step.number].lerp_(overlap.mean(), 1 - _MEMORY)
                reached = torch.zeros_like(reached).index_copy(0, step.selected, weights * overlap)
            same.append(rows.same / max(1, rows.rows))
        loss = torch.stack(losses).sum()
        (loss * scale).backward()
        return PassResult(float(loss.detach()), tuple(same))

    def _loss(
        self, batch: _Batch, step: _Step, into: Comparison, weights: Tensor | None = None
    ) -> Tensor:
        """Return the sum of the divergences of a step's rows, divided by their expected number.

        ``into`` gets the comparison of each row with the target. ``weights`` are factors of the
        rows' divergences, by default 1.
        """
        if not len(step.selected):
            return step.normed.sum()
        head = self._head if self.module.lm_head is None else self.module.lm_head.weight
        # placeholders: the loss depends on the target's distribution only, not on the text
        labels = torch.zeros_like(step.selected)
        loss = distillation_loss(
            step.normed,
            head,
            lambda rows: batch.logits[step.teacher[rows]],
            labels,
            into=into,
            row_weights=weights,
        )
        return loss * (len(step.selected) / step.num_rows)

    def _steps(self, batch: _Batch) -> Iterator[_Step]:
        """Run the head over a batch, and yield the output of each step of training-time test."""
        module = self.module
        with autocast(self.device):
            feature = module.fuse(batch.hidden)
        tokens = batch.tokens
        positions = batch.positions
        active = batch.active
        rows = torch.arange(len(active), device=self.device)  # active rows of the step
        num_rows: float = len(active)
        for number in range(self.options.depth):
            if number == 1:  # later steps have only the rows that draft further tokens
                rows = batch.chained
                num_rows = batch.chains * len(active)
                tokens = tokens[active[rows]]
                positions = positions[active[rows]]
                feature = feature[rows]
            ids = batch.ids[(tokens + number).clamp(max=len(batch.ids) - 1)]
            embedding = F.embedding(ids, self._embedding).float()
            queries = None if number else active
            with autocast(self.device):
                out = module(embedding, feature, positions + number, batch.attend, queries)
            normed, feature = module.read_out(out)
            within = (number < batch.rest[rows]).nonzero().flatten()
            places = within[batch.inside[batch.teacher[rows[within]] + number]]
            selected = rows[places]
            teacher = batch.teacher[selected] + number
            yield _Step(number, num_rows, normed[places], selected, teacher)

    def _prepare(self, inputs: Tensor, marks: Tensor, chains: float = 1.0) -> _Batch | None:
        """Run the target over the dialogues of a batch, and return what the head learns from.

        ``inputs`` and ``marks`` are ``[count, length]``, and ``chains`` is the fraction of the rows
        that draft further tokens. The result is ``None`` if no row drafts within an answer.
        """
        parts: dict[str, list[Tensor]] = {}
        lengths = list[int]()
        active_rows = list[Tensor]()
        chained_rows = list[Tensor]()
        num_active = 0
        rows = 0
        num_ids = 0
        num_logits = 0
        t2d = self.module.t2d.cpu()
        for ids, kinds in split_dialogues(inputs, marks):
            answered = kinds >= Mark.GREEDY
            # the first draft token of row i is token i + 2
            active = answered[2:].nonzero().flatten()
            if not len(active):
                continue
            first = int(active[0]) + 1
            count = len(ids) - 2
            kept = _choose(len(active), chains)
            states = self.states(ids.tolist(), first)
            positions = torch.arange(count)
            pieces = {
                "hidden": states.hidden[:count],
                "ids": ids,
                "tokens": num_ids + 1 + positions,
                "positions": positions,
                "active": rows + active,
                "chained": num_active + kept,
                "rest": _run_lengths(answered)[2:][active],
                "teacher": num_logits + active + 1 - first,
                "last": states.last,
                "inside": t2d[states.likeliest],
                "greedy": (kinds[2:] == Mark.GREEDY)[active],
            }
            for name, piece in pieces.items():
                parts.setdefault(name, []).append(piece.to(self.device))
            lengths.append(count)
            active_rows.append(active)
            chained_rows.append(active[kept])
            num_active = num_active + len(active)
            rows = rows + count
            num_ids = num_ids + len(ids)
            num_logits = num_logits + len(states.last)
        if not rows:
            return None
        if not any(map(len, chained_rows)):  # later steps need a row, and this one has no weight
            chained_rows[0] = active_rows[0][:1]
            parts["chained"][0] = torch.zeros(1, dtype=torch.int64, device=self.device)
            chains = math.inf
        tensors = {name: torch.cat(pieces) for name, pieces in parts.items()}
        tensors["hidden"] = self.module.inputs(tensors["hidden"].float())
        dtype = product_dtype(self.device)
        products = tensors.pop("last").to(dtype) @ self._head.to(dtype).T
        logits = scale_logits(products, self.teacher.llm.config)
        return _Batch(
            **tensors,
            logits=logits,
            attend=ChainAttention(lengths, active_rows, chained_rows),
            chains=chains,
        )

    @torch.no_grad()
    def evaluate(self, length: int, seconds: float = math.inf) -> dict[str, float]:
        """Measure the head on held-out dialogues, then in the engine, each for half of ``seconds``.

        On held-out dialogues, the tokens before each draft token are those of the text. For each
        draft position there are two figures, ``KL`` and ``same`` (see :class:`Comparison`). ``S``
        is the number of tokens per forward pass if a chain of ``depth`` draft tokens begins at
        every position of the greedy answers, and ``sampled S`` the same for the sampled answers.
        The figures of the engine are described in ``served.py``. With the option ``bits``, all
        figures are those of the rounded weights.
        """
        held_out = self.dialogues.held_out
        if not held_out:
            return {}
        with self._as_deployed():
            figures = self._compare(length, seconds / 2)
        if not self.options.num_tokens:
            return figures
        answered = [dialogue for dialogue in held_out if dialogue.answers]
        questions = [dialogue.ids[: dialogue.answers[0][0]] for dialogue in answered]
        spec = f"{self.options.kind}(model={{model!r}}, num_tokens={self.options.num_tokens})"
        return figures | self.serve(self.teacher.llm, spec, questions[:_QUESTIONS], seconds / 2)

    def _compare(self, length: int, seconds: float) -> dict[str, float]:
        """Return the figures on held-out dialogues."""
        held_out = Dialogues(self.dialogues.held_out, max(length, self.options.length), seed=0)
        rows = [_Rows() for _ in range(self.options.depth)]
        chains = {"S": [0.0, 0], "sampled S": [0.0, 0]}
        batches = held_out.batches(max(1, self.options.micro // held_out.length))
        for inputs, marks in limit_time(seconds, batches):
            batch = self._prepare(inputs, marks)
            if batch is not None:
                self._add_figures(batch, rows, chains)
        figures: dict[str, float] = {}
        for number, compared in enumerate(rows, 1):
            if compared.rows:
                figures[f"held-out KL {number}"] = compared.divergence / compared.rows
                figures[f"held-out same {number}"] = compared.same / compared.rows
        for name, (total, count) in chains.items():
            if count:
                figures[f"held-out {name}"] = 1 + total / count
        return figures

    def _add_figures(
        self, batch: _Batch, rows: Sequence[_Rows], chains: dict[str, list[Any]]
    ) -> None:
        """Add the comparisons of a batch to ``rows``, and its accepted draft tokens to ``chains``.

        ``rows`` has one comparison per draft position. ``chains`` has the keys ``S`` and ``sampled
        S``; each value is a list of two sums, the number of accepted draft tokens and the number of
        chains.
        """
        reached = torch.ones(len(batch.active), device=self.device)
        total = torch.zeros_like(reached)
        first_tokens = batch.tokens[batch.active] + 1
        for step in self._steps(batch):
            compared = rows[step.number]
            before = len(compared.overlaps)
            self._loss(batch, step, compared)
            if len(compared.overlaps) == before:
                break
            overlap = torch.cat(compared.overlaps[before:])
            likeliest = torch.cat(compared.likeliest[before:])
            del compared.overlaps[before:], compared.likeliest[before:]
            text = batch.ids[first_tokens[step.selected] + step.number]
            hit = self.module.draft_ids.to(likeliest.device)[likeliest] == text
            accepted = torch.where(batch.greedy[step.selected], hit.float(), overlap)
            still_reached = reached[step.selected] * accepted
            reached = torch.zeros_like(reached).index_copy(0, step.selected, still_reached)
            total += reached
        for name, chosen in (("S", batch.greedy), ("sampled S", ~batch.greedy)):
            chains[name][0] += float(total[chosen].sum())
            chains[name][1] += int(chosen.sum())

    def export(self, folder: Path, card: str, facts: Mapping[str, Any]) -> None:  # noqa: ARG002 - the card has them
        """Write the head to ``folder`` in the layout speculators, which vLLM reads, too.

        ``card`` is the content of ``README.md``. With the option ``bits``, the head is written as
        ``pronk quantize`` writes it: its weights are trained for that.
        """
        documents = {"config.json": self.config.document(self.options.num_tokens)}
        if self.acceptance:
            documents[ACCEPTANCE_FILE] = head_acceptance_document(self.acceptance)
        if self.options.bits is None:
            export_tensors(folder, self.module.exported(), documents, card)
            return
        # if the process is killed, the next export replaces this folder
        plain = folder.with_name(f"{folder.name}.plain")
        try:
            export_tensors(plain, self.module.exported(), documents, card)
            with replace_folder(folder) as partial:
                quantize_head(plain, partial, self.options.bits, None)
        finally:
            shutil.rmtree(plain, ignore_errors=True)


def position_weights(weighting: str, decay: float, acceptance: Sequence[float]) -> list[float]:
    """Return the factors by which the loss of each draft position ``s`` (from 0) is multiplied.

    ``weighting`` is one of:

    - ``decay``: the factor is ``decay ** s``.
    - ``dpace`` (arXiv 2605.18810): the factor is the sum over ``k >= s`` of the product of
      ``acceptance[s] .. acceptance[k]``. Multiplied by the acceptance of all positions before
      ``s``, which is a factor of each row, it is the derivative of the expected accepted length by
      the log-probability at ``s``.

    ``acceptance`` has the measured acceptance of each draft position, 0..1.
    """
    if weighting == "decay":
        return [decay**step for step in range(len(acceptance))]
    weights = list[float]()
    rest = 0.0
    for accepted in reversed(acceptance):
        rest = accepted * (1 + rest)
        weights.insert(0, rest)
    return weights


def _choose(count: int, fraction: float) -> Tensor:
    """Return some of the indices below ``count``, each with the probability ``fraction``."""
    if fraction == 1:
        return torch.arange(count)
    return (torch.rand(count) < fraction).nonzero().flatten()


def _run_lengths(flags: Tensor) -> Tensor:
    """Return, for each index, how many successive flags from there on are true.

    For ``1 1 0 1`` these are ``2 1 0 1``.
    """
    places = torch.arange(len(flags))
    # for a false flag its index, for a true one the length
    ends = torch.where(flags, len(flags), places)
    return ends.flip(0).cummin(0).values.flip(0) - places
