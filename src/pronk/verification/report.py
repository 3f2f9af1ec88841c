"""The result of a verification."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from pronk.verification.distribution import Distribution
from pronk.verification.equality import Equality
from pronk.verification.prompts import VerifySettings
from pronk.verification.rescoring import Rescoring

Verdict = Literal["passed", "failed", "vacuous", "skipped", "unfinished"]


@dataclass(frozen=True)
class DrafterReport:
    """Results of one drafter's checks; ``None`` for a check that has not run."""

    drafter: str
    plain: bool  # whether ``drafter`` is plain decoding, which needs no accepted draft token to pass
    equality: Equality | None = None
    rescoring: Rescoring | None = None
    distribution: Distribution | None = None

    @property
    def drafted(self) -> int:
        """Number of draft tokens in all checks; texts shared by ``equality`` and ``rescoring`` count once."""
        return sum(check.drafted for check in (self.rescoring, self.distribution) if check is not None)

    @property
    def accepted(self) -> int:
        """Number of accepted draft tokens in all checks; shared texts count once, as in :attr:`drafted`."""
        return sum(check.accepted for check in (self.rescoring, self.distribution) if check is not None)

    @property
    def tested(self) -> bool:
        """Whether a draft token was accepted, so that the drafter had an effect; true for plain decoding."""
        return self.plain or self.accepted > 0

    @property
    def failed(self) -> bool:
        """Whether one of the checks failed."""
        return any(check.failed for check in self._checks.values() if check is not None)

    @property
    def _checks(self) -> dict[str, Equality | Rescoring | Distribution | None]:
        return {"equality": self.equality, "rescoring": self.rescoring, "distribution": self.distribution}

    def verdicts(self) -> dict[str, Verdict]:
        """Return the verdicts by name of the check."""
        return {name: self._verdict(check) for name, check in self._checks.items()}

    def _verdict(self, check: Equality | Rescoring | Distribution | None) -> Verdict:
        if check is None:
            return "skipped"
        if check.failed:
            return "failed"
        return "passed" if self.plain or check.accepted else "vacuous"

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        verdict: Verdict = "failed" if self.failed else "passed" if self.tested else "vacuous"
        return {
            "drafter": self.drafter,
            "verdict": verdict,
            "drafted": self.drafted,
            "accepted": self.accepted,
            "checks": {
                name: {"verdict": check_verdict} | ({} if (check := self._checks[name]) is None else check.to_dict())
                for name, check_verdict in self.verdicts().items()
            },
        }


@dataclass(frozen=True)
class VerifyReport:
    """Results of the drafters so far, and configuration of the model under test."""

    model: str
    device: str
    dtype: str
    weights: str  # storage format of the weight matrices
    kv_dtype: str
    kernels: str  # instruction set of pronk's kernels, or "torch" without them
    exact: bool  # whether the kernels guarantee bit-identical logits; if so, near ties count as failures
    settings: VerifySettings
    prompts: int  # number of tested prompts: those that fit the model's context
    too_long: int  # number of prompts left out because they exceed the model's context
    drafters: tuple[DrafterReport, ...]
    left_out: Mapping[str, str] = field(default_factory=dict)  # drafters that were not tested: name to reason
    required: bool = True  # whether every drafter must have an accepted draft token to pass
    complete: bool = False

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

        With ``required`` every drafter needs an accepted draft token; otherwise one drafter suffices.
        """
        others = [result for result in self.drafters if not result.plain]
        tested = all(result.tested for result in others) if self.required else any(result.tested for result in others)
        return self.complete and not self.failed and (tested or not others)

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        names = ("passed", "complete", "model", "device", "dtype", "weights", "kv_dtype", "kernels", "exact")
        return {
            **{name: getattr(self, name) for name in names},
            **asdict(self.settings),
            "prompts": self.prompts,
            "prompts_too_long": self.too_long,
            "drafters": [result.to_dict() for result in self.drafters],
            "left_out": dict(self.left_out),
            "not_tested": list(self.vacuous),
        }
