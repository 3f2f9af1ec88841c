"""A verification: all checks of all drafters, one after the other."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

from pronk.drafters import REGISTRY, Autoregressive, Drafter, Proposer, make_drafter
from pronk.errors import OptionError
from pronk.llm import LLM
from pronk.models.decoder import forward_weights
from pronk.sampling.params import Rule, SamplingParams
from pronk.verification.distribution import NUM_DRAWN_TOKENS, SIGNIFICANCE, choose_extended, draw, judge_counts
from pronk.verification.equality import MODES, Equality, GeneratedText, compare, generate_texts
from pronk.verification.prompts import NamedPrompt, Progress, ProgressMeter, VerifySettings, select_fitting
from pronk.verification.report import DrafterReport, VerifyReport
from pronk.verification.rescoring import Rescoring, TextScorer, rescore

_NUM_CANDIDATES = 4  # number of prompts from which the test of the distribution chooses one
_PLAIN = Autoregressive.name  # plain decoding: the drafter that proposes no tokens


def verify_steps(
    llm: LLM,
    drafters: Sequence[str | Drafter],
    prompts: Sequence[NamedPrompt],
    settings: VerifySettings | None = None,
    *,
    required: bool = True,
    left_out: Mapping[str, str] | None = None,
    progress: Progress | None = None,
) -> Iterator[VerifyReport]:
    """Verify that drafters do not change the model's output; yield the report after each group of texts.

    Args:
        llm: model on the device and in the dtype to verify.
        drafters: names, names with options, or options objects. Plain decoding is always included: its texts in a batch
            are compared with its texts one at a time.
        prompts: prompts to continue; those that are too long for the model are left out and counted.
        settings: amount of text, seed and acceptance rule; ``None``: the defaults.
        required: whether every drafter must have an accepted draft token (see :attr:`VerifyReport.passed`).
        left_out: drafters that the caller left out, with the reasons; copied to the report.
        progress: callback ``(label of the current part, tokens done, tokens in all)``.

    Raises ``PromptError`` if no prompt fits, ``OptionError`` if a drafter cannot run on the model.
    """
    settings = settings or VerifySettings()
    fitting = select_fitting(llm, prompts, settings.max_tokens)
    others = [drafter for drafter in dict.fromkeys(drafters) if drafter not in (_PLAIN, Autoregressive())]
    proposers = [_get_proposer(llm, drafter, fitting[0], settings.rule) for drafter in (_PLAIN, *others)]
    names = [drafter if isinstance(drafter, str) else drafter.name for drafter in (_PLAIN, *others)]
    report = VerifyReport(
        str(llm.path),
        str(llm.device),
        str(llm.dtype),
        forward_weights(llm.engine.runner.decoder).formats,
        str(llm.engine.cache.kv_dtype),
        llm.kernels,
        llm.exact,
        settings,
        len(fitting),
        len(prompts) - len(fitting),
        (),
        left_out or {},
        required,
    )
    tokens = len(MODES) * 2 * len(fitting) * settings.max_tokens + settings.samples * NUM_DRAWN_TOKENS
    meter = ProgressMeter(progress, len(proposers) * tokens)
    exact = choose_extended(llm, fitting[:_NUM_CANDIDATES]) if settings.samples else None
    scorer, threshold = TextScorer.make(llm, fitting), SIGNIFICANCE / len(proposers)
    reference: dict[str, list[GeneratedText]] = {}  # mode to the texts of plain decoding
    finished: tuple[DrafterReport, ...] = ()
    for name, proposer in zip(names, proposers, strict=True):
        equality, rescoring = Equality(llm.exact), Rescoring(scorer.tolerance)
        for mode, batch in product(MODES, (False, True)):
            meter.begin(f"{name}: {mode}{', in a batch' if batch else ''}")
            texts = generate_texts(llm, proposer, fitting, mode, settings, meter, batch=batch)
            # The first drafter is plain decoding: its texts become the reference of all drafters.
            equality = compare(llm, equality, reference.setdefault(mode, texts), texts)
            rescoring = rescore(scorer, rescoring, texts)
            result = DrafterReport(name, isinstance(proposer, Autoregressive), equality, rescoring)
            yield replace(report, drafters=(*finished, result))
        if exact is not None:
            meter.begin(f"{name}: distribution")
            drawn = draw(llm, exact, proposer, settings, meter)
            result = replace(result, distribution=judge_counts(exact, drawn, threshold))
            yield replace(report, drafters=(*finished, result))
        finished = (*finished, result)
    yield replace(report, drafters=finished, complete=True)


def fitting_drafters(llm: LLM, prompt: NamedPrompt, rule: Rule = "coupled") -> tuple[list[str], dict[str, str]]:
    """Return the names of drafters that run on the model without options, and why the others do not."""
    fitting, reasons = list[str](), dict[str, str]()
    for name in REGISTRY:
        try:
            _get_proposer(llm, name, prompt, rule)
        except OptionError as error:
            reasons[name] = str(error)
        else:
            fitting.append(name)
    return fitting, reasons


def _get_proposer(llm: LLM, drafter: str | Drafter, prompt: NamedPrompt, rule: Rule) -> Proposer[Any]:
    """Return the drafter's proposer after a trial of four tokens; raise OptionError if the drafter fails."""
    proposer = llm.get_proposer(make_drafter(drafter))
    completion = llm.generate(
        prompt.ids, SamplingParams(max_tokens=4, temperature=1.0, seed=0, rule=rule), drafter=proposer
    )
    if completion.stats.draft_error is not None:
        raise OptionError(completion.stats.draft_error)
    return proposer
