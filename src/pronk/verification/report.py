"""What a verification found."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from pronk.verification.distribution import Distribution
from pronk.verification.equality import Equality
from pronk.verification.prompts import VerifySettings
from pronk.verification.rescoring import Rescoring

__all__ = ["DrafterReport", "Verdict", "VerifyReport"]

Verdict = Literal["passed", "failed", "vacuous", "skipped", "unfinished"]


@dataclass(frozen=True)
class DrafterReport:
    """One drafter's checks; ``None`` is one that has not run.

    Attributes:
        drafter: its name as it was given.
        plain: whether it is plain decoding itself, which needs no guesses to be tested.
        equality: its texts against plain decoding.
        rescoring: its log-probabilities against scoring in one pass.
        distribution: its strings against the model's law.
    """

    drafter: str
    plain: bool
    equality: Equality | None = None
    rescoring: Rescoring | None = None
    distribution: Distribution | None = None

    @property
    def drafted(self) -> int:
        """Guesses in all checks."""
        return sum(check.drafted for check in (self.rescoring, self.distribution) if check is not None)

    @property
    def accepted(self) -> int:
        """Guesses that the target confirmed, in all checks."""
        return sum(check.accepted for check in (self.rescoring, self.distribution) if check is not None)

    @property
    def tested(self) -> bool:
        """Whether a guess was accepted: without one, a check has seen plain decoding and nothing else."""
        return self.plain or self.accepted > 0

    @property
    def failed(self) -> bool:
        """Whether one of the checks failed."""
        return any(check.failed for check in (self.equality, self.rescoring, self.distribution) if check is not None)

    def verdicts(self) -> dict[str, Verdict]:
        """The verdict of each check."""
        checks = {"equality": self.equality, "rescoring": self.rescoring, "distribution": self.distribution}
        return {name: self._verdict(check) for name, check in checks.items()}

    def _verdict(self, check: Equality | Rescoring | Distribution | None) -> Verdict:
        if check is None:
            return "skipped"
        if check.failed:
            return "failed"
        return "passed" if self.plain or check.accepted else "vacuous"

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        checks = {"equality": self.equality, "rescoring": self.rescoring, "distribution": self.distribution}
        verdict: Verdict = "failed" if self.failed else "passed" if self.tested else "vacuous"
        return {
            "drafter": self.drafter,
            "verdict": verdict,
            "drafted": self.drafted,
            "accepted": self.accepted,
            "checks": {
                name: {"verdict": given} | ({} if (check := checks[name]) is None else check.to_dict())
                for name, given in self.verdicts().items()
            },
        }


@dataclass(frozen=True)
class VerifyReport:
    """What was verified so far.

    Attributes:
        model: where it came from.
        device: where it ran.
        dtype: of its weights.
        weights: how its matrices are kept.
        kv_dtype: of its cache.
        kernels: what computed: the instruction set of pronk's kernels, or ``"torch"``.
        exact: whether these promise the same tokens to the bit; then a near tie is a failure, too.
        settings: how much was verified.
        prompts: how many prompts were used.
        too_long: how many were left out because the model's context is too short for them.
        drafters: plain decoding, then the drafters.
        left_out: drafters that do not fit the model without options, and why.
        required: whether the drafters were asked for, so that one of which no guess was accepted is not verified.
        complete: whether all checks have run.
    """

    model: str
    device: str
    dtype: str
    weights: str
    kv_dtype: str
    kernels: str
    exact: bool
    settings: VerifySettings
    prompts: int
    too_long: int
    drafters: tuple[DrafterReport, ...]
    left_out: Mapping[str, str] = field(default_factory=dict)
    required: bool = True
    complete: bool = False

    @property
    def vacuous(self) -> tuple[str, ...]:
        """Drafters of which no guess was accepted in any check."""
        return tuple(each.drafter for each in self.drafters if not each.tested)

    @property
    def failed(self) -> tuple[str, ...]:
        """Drafters with a check that failed."""
        return tuple(each.drafter for each in self.drafters if each.failed)

    @property
    def passed(self) -> bool:
        """Whether all checks have run, none failed, and guesses took part.

        A drafter that was asked for and of which no guess was accepted is not verified. Of drafters that were not
        asked for by name it is enough if some were.
        """
        guessing = [each for each in self.drafters if not each.plain]
        tested = all(each.tested for each in guessing) if self.required else any(each.tested for each in guessing)
        return self.complete and not self.failed and (tested or not guessing)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
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
            "max_tokens": self.settings.max_tokens,
            "samples": self.settings.samples,
            "seed": self.settings.seed,
            "rule": self.settings.rule,
            "prompts": self.prompts,
            "prompts_too_long": self.too_long,
            "drafters": [each.to_dict() for each in self.drafters],
            "left_out": dict(self.left_out),
            "not_tested": list(self.vacuous),
        }
