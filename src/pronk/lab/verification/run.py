"""A verification: all checks of all drafters, one after the other, and their results."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import product
from typing import Any, Literal

from pronk import LLM, Autoregressive, Drafter, OptionError, Proposer, SamplingParams
from pronk.backends import forward_weights
from pronk.drafting import REGISTRY, make_drafter
from pronk.lab.verification.distribution import (
    NUM_DRAWN_TOKENS,
    Distribution,
    draw,
    judge_counts,
)
from pronk.lab.verification.equality import MODES, Equality, GeneratedText, compare, generate_texts
from pronk.lab.verification.exact_distribution import choose_extended
from pronk.lab.verification.prompts import (
    NamedPrompt,
    Progress,
    ProgressMeter,
    VerifySettings,
    select_fitting,
)
from pronk.lab.verification.rescoring import Rescoring, TextScorer, rescore
from pronk.serving import Rule

# Verdict on a check: "vacuous" if the check passed without any accepted draft token, and "skipped"
# if it has not run.
Verdict = Literal["passed", "failed", "vacuous", "skipped"]

# Maximum probability that a correct sampler fails a verification. Each of the n tests of a
# verification gets 1 / n of this probability (Bonferroni).
_SIGNIFICANCE = 1e-4
_NUM_CANDIDATES = 4  # number of prompts from which the test of the distribution chooses one
_PLAIN = Autoregressive.name  # plain decoding: the drafter that proposes no tokens


@dataclass(frozen=True)
class DrafterReport:
    """Results of one drafter's checks; ``None`` for a check that has not run."""

    drafter: str
    # Whether ``drafter`` is plain decoding, which needs no accepted draft token to pass.
    plain: bool
    equality: Equality | None = None  # tokens against those of plain decoding
    rescoring: Rescoring | None = None  # log-probabilities against those of a prefill
    distribution: Distribution | None = None  # chi-square test of sampled strings

    @property
    def drafted(self) -> int:
        """Number of draft tokens in all checks.

        ``equality`` and ``rescoring`` check the same texts, which count once.
        """
        checks = (self.rescoring, self.distribution)
        return sum(check.drafted for check in checks if check is not None)

    @property
    def accepted(self) -> int:
        """Number of accepted draft tokens in all checks, counted as in :attr:`drafted`."""
        checks = (self.rescoring, self.distribution)
        return sum(check.accepted for check in checks if check is not None)

    @property
    def tested(self) -> bool:
        """Whether a draft token was accepted, so that the drafter had an effect.

        True for plain decoding.
        """
        return self.plain or self.accepted > 0

    @property
    def failed(self) -> bool:
        """Whether one of the checks failed."""
        return any(check.failed for check in self._checks.values() if check is not None)

    @property
    def _checks(self) -> dict[str, Equality | Rescoring | Distribution | None]:
        return {
            "equality": self.equality,
            "rescoring": self.rescoring,
            "distribution": self.distribution,
        }

    def verdicts(self) -> dict[str, Verdict]:
        """Return the verdict on each check, by the name of the check."""
        return {name: self._verdict(check) for name, check in self._checks.items()}

    def _verdict(self, check: Equality | Rescoring | Distribution | None) -> Verdict:
        if check is None:
            return "skipped"
        if check.failed:
            return "failed"
        return "passed" if self.plain or check.accepted else "vacuous"

    def to_dict(self) -> dict[str, Any]:
        """Return the verdicts and the results of all checks as JSON values."""
        verdict: Verdict = "passed" if self.tested else "vacuous"
        if self.failed:
            verdict = "failed"
        checks: dict[str, dict[str, Any]] = {}
        for name, check in self._checks.items():
            checks[name] = {"verdict": self._verdict(check)}
            if check is not None:
                checks[name] |= check.to_dict()
        return {
            "drafter": self.drafter,
            "verdict": verdict,
            "drafted": self.drafted,
            "accepted": self.accepted,
            "checks": checks,
        }


@dataclass(frozen=True)
class VerifyReport:
    """Results of the drafters so far, and configuration of the model under test."""

    model: str
    device: str  # "cpu", or a device that a package adds
    dtype: str  # data type of the weights that are not quantized
    weights: str  # storage format of the weight matrices
    kv_dtype: str  # data type of the keys and values in the cache
    kernels: str  # instruction set of pronk's kernels
    # Whether the kernels guarantee bit-identical logits: near ties then count as failures.
    exact: bool
    settings: VerifySettings
    prompts: int  # number of tested prompts: those that fit the model's context
    too_long: int  # number of prompts left out because they exceed the model's context
    drafters: tuple[DrafterReport, ...]
    # Drafters that were not tested, with the reasons, by name.
    left_out: Mapping[str, str] = field(default_factory=dict)
    required: bool = True  # whether every drafter must have an accepted draft token to pass
    complete: bool = False  # whether all drafters were tested: the run was not interrupted

    @property
    def vacuous(self) -> tuple[str, ...]:
        """Drafters without an accepted draft token in any check."""
        return tuple(result.drafter for result in self.drafters if not result.tested)

    @property
    def failed(self) -> tuple[str, ...]:
        """Drafters with a failed check."""
        return tuple(result.drafter for result in self.drafters if result.failed)

    @property
    def passed(self) -> bool:
        """Whether all checks have run, none failed, and draft tokens were accepted.

        With ``required`` every drafter needs an accepted draft token; otherwise one drafter
        suffices.
        """
        others = [result for result in self.drafters if not result.plain]
        suffices = all if self.required else any
        tested = suffices(result.tested for result in others)
        return self.complete and not self.failed and (tested or not others)

    def to_dict(self) -> dict[str, Any]:
        """Return the report as JSON values."""
        return {
            "passed": self.passed,
            "complete": self.complete,
            "model": self.model,
            "device": self.device,
            "dtype": self.dtype,
            "weights": self.weights,
            "kv_dtype": self.kv_dtype,
            "kernels": self.kernels,
            "exact": self.exact,
            **asdict(self.settings),
            "prompts": self.prompts,
            "prompts_too_long": self.too_long,
            "drafters": [result.to_dict() for result in self.drafters],
            "left_out": dict(self.left_out),
            "not_tested": list(self.vacuous),
        }


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
    """Verify that drafters do not change the model's output; yield the report after each group.

    A group is the texts of one drafter in one mode.

    Args:
        llm: model on the device and in the dtype to verify.
        drafters: names, names with options, or options objects. Plain decoding is always included:
            its texts in a batch are compared with its texts one at a time.
        prompts: prompts to continue; those that are too long for the model are left out and
            counted.
        settings: amount of text, seed and acceptance rule; ``None``: the defaults.
        required: whether every drafter must have an accepted draft token (see
            :attr:`VerifyReport.passed`).
        left_out: drafters that the caller left out, with the reasons; copied to the report.
        progress: callback ``(label of the current part, tokens done, tokens in all)``.

    Raises ``PromptError`` if no prompt fits, ``OptionError`` if a drafter cannot run on the model.
    """
    settings = settings or VerifySettings()
    fitting = select_fitting(llm, prompts, settings.max_tokens)
    plain = (_PLAIN, Autoregressive())
    others = [drafter for drafter in dict.fromkeys(drafters) if drafter not in plain]
    all_drafters = [_PLAIN, *others]
    proposers = [_get_proposer(llm, drafter, fitting[0], settings.rule) for drafter in all_drafters]
    names = [drafter if isinstance(drafter, str) else drafter.name for drafter in all_drafters]
    report = VerifyReport(
        model=str(llm.path),
        device=str(llm.device),
        dtype=str(llm.dtype),
        weights=forward_weights(llm.engine.runner.decoder).formats,
        kv_dtype=str(llm.engine.cache.kv_dtype),
        kernels=llm.kernels,
        exact=llm.exact,
        settings=settings,
        prompts=len(fitting),
        too_long=len(prompts) - len(fitting),
        drafters=(),
        left_out=left_out or {},
        required=required,
    )
    num_text_tokens = len(MODES) * 2 * len(fitting) * settings.max_tokens
    num_tokens = num_text_tokens + settings.samples * NUM_DRAWN_TOKENS
    meter = ProgressMeter(progress, len(proposers) * num_tokens)
    exact = choose_extended(llm, fitting[:_NUM_CANDIDATES]) if settings.samples else None
    scorer = TextScorer.make(llm, fitting)
    threshold = _SIGNIFICANCE / len(proposers)
    reference: dict[str, list[GeneratedText]] = {}  # texts of plain decoding, by decoding mode
    finished: tuple[DrafterReport, ...] = ()
    for name, proposer in zip(names, proposers, strict=True):
        equality = Equality(llm.exact)
        rescoring = Rescoring(scorer.tolerance)
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


def fitting_drafters(
    llm: LLM, prompt: NamedPrompt, rule: Rule = "coupled"
) -> tuple[list[str], dict[str, str]]:
    """Return the names of drafters that run on the model without options, and why others fail.

    The second value is the error message of each drafter that does not run, by its name.
    """
    fitting = list[str]()
    reasons = dict[str, str]()
    for name in REGISTRY:
        try:
            _get_proposer(llm, name, prompt, rule)
        except OptionError as error:
            reasons[name] = str(error)
        else:
            fitting.append(name)
    return fitting, reasons


def _get_proposer(
    llm: LLM, drafter: str | Drafter, prompt: NamedPrompt, rule: Rule
) -> Proposer[Any]:
    """Return the drafter's proposer, after it has helped to generate four tokens as a trial.

    Raises OptionError if the drafter fails in the trial.
    """
    proposer = llm.get_proposer(make_drafter(drafter))
    params = SamplingParams(max_tokens=4, temperature=1.0, seed=0, rule=rule)
    completion = llm.generate(prompt.ids, params, drafter=proposer)
    if completion.stats.draft_error is not None:
        raise OptionError(completion.stats.draft_error)
    return proposer
