"""Precision and recall of moderation by the model itself (``pronk bench --moderation FILE``).

Each line of FILE is a JSON object with ``"text"`` and at least one of

- ``"categories"``: the right categories, a list of names or an object of name to bool; empty: the
  text is acceptable,
- ``"flagged"``: whether the text has any category; without it, whether ``"categories"`` is not
  empty,

and optionally ``"kind"``, ``"prompt"`` (the default) or ``"answer"``. The prompt and the scores are
those of ``/v1/moderations`` (:mod:`pronk.server.moderation`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pronk import LLM, OptionError
from pronk.base import read_json_lines, refuse
from pronk.server import CATEGORIES, ModerationPrompt

_BATCH = 64  # texts whose prompts are in memory at a time
_NAMES = tuple(CATEGORIES)[:-1]  # without the last category, for acceptable texts


@dataclass(frozen=True)
class Case:
    """A text with its right answer."""

    text: str
    kind: str  # "prompt" of a user, or "answer" of a model
    flagged: bool  # whether the text is not acceptable
    # Right categories, empty for an acceptable text. ``None``: the file says only that the text is
    # not acceptable.
    categories: frozenset[str] | None


@dataclass
class Counts:
    """Right and wrong answers about one class of texts."""

    true_positives: int = 0  # of the class, and recognized
    false_positives: int = 0  # of another class, and taken for this one
    false_negatives: int = 0  # of the class, and not recognized
    true_negatives: int = 0

    def add(self, *, expected: bool, found: bool) -> None:
        """Count a text.

        ``expected`` is whether the text belongs to the class, ``found`` whether the model said so.
        """
        if found and expected:
            self.true_positives += 1
        elif found:
            self.false_positives += 1
        elif expected:
            self.false_negatives += 1
        else:
            self.true_negatives += 1

    @property
    def rates(self) -> dict[str, float | None]:
        """Precision, recall and their harmonic mean F1, each 0..1; ``None``: divided by 0 texts."""
        hits = self.true_positives
        wrong = self.false_positives
        missed = self.false_negatives
        shares = {"precision": (hits, hits + wrong), "recall": (hits, hits + missed)}
        shares["f1"] = 2 * hits, 2 * hits + wrong + missed
        return {name: part / whole if whole else None for name, (part, whole) in shares.items()}


@dataclass(frozen=True)
class ModerationResult:
    """Counts of one model."""

    model: str  # name of its folder or file
    kernels: str
    texts: int  # number of texts
    # Counts by name: ``flagged`` texts, ``acceptable`` texts (the positives of the Mistral 7B
    # paper), and each category. Texts whose category is unknown do not count for categories.
    classes: dict[str, Counts]

    def to_dict(self) -> dict[str, Any]:
        """Return the result as JSON values."""
        rows = {name: asdict(counts) | counts.rates for name, counts in self.classes.items()}
        return {"model": self.model, "kernels": self.kernels, "texts": self.texts, "classes": rows}

    def to_markdown(self) -> str:
        """Return the result as a Markdown table."""
        lines = [f"{self.model}, {self.texts} texts, kernels {self.kernels}", ""]
        lines += [
            "| texts | number | found | precision | recall | F1 |",
            "|---|--:|--:|--:|--:|--:|",
        ]
        for name, each in self.classes.items():
            numbers = (
                each.true_positives + each.false_negatives,
                each.true_positives + each.false_positives,
            )
            rates = ("–" if rate is None else f"{rate:.1%}" for rate in each.rates.values())
            lines.append(f"| {' | '.join((name, *map(str, numbers), *rates))} |")
        return "\n".join(lines) + "\n"


def read_cases(path: Path) -> list[Case]:
    """Read the texts of a JSON-lines file.

    Raises OptionError if the file has no text, or for a malformed line, with its number.
    """
    cases = [_parse(row, f"{path}, line {number}") for number, row in read_json_lines(path)]
    if not cases:
        refuse(path, "expected at least one text, found none", OptionError)
    return cases


def evaluate(
    llm: LLM, cases: Sequence[Case], progress: Callable[[int, int], None]
) -> ModerationResult:
    """Classify all texts; ``progress`` receives the number of finished texts, and the total."""
    classes = {name: Counts() for name in ("flagged", "acceptable", *_NAMES)}
    for start in range(0, len(cases), _BATCH):
        part = cases[start : start + _BATCH]
        for case, (scores, flagged) in zip(part, _classify(llm, part), strict=True):
            classes["flagged"].add(expected=case.flagged, found=flagged)
            classes["acceptable"].add(expected=not case.flagged, found=not flagged)
            if case.categories is not None:
                best = max(scores, key=lambda name: scores[name])
                for name in _NAMES:
                    classes[name].add(
                        expected=name in case.categories, found=flagged and name == best
                    )
        progress(start + len(part), len(cases))
    return ModerationResult(llm.path.name, llm.kernels, len(cases), classes)


def _classify(llm: LLM, cases: Iterable[Case]) -> Iterator[tuple[dict[str, float], bool]]:
    """Yield, for each text, its scores by category and whether the text is flagged."""
    prompt = ModerationPrompt(llm.tokenizer)
    ids: list[list[int]] = []
    for case in cases:
        messages = prompt.messages(case.text, case.kind)
        ids.append(llm.chat_ids(messages, template_options=prompt.options))
    for done in llm.generate(ids, prompt.params, drafter="autoregressive"):
        assert done.logprobs is not None, "expected log-probabilities, for which the parameters ask"
        yield prompt.scores(done.logprobs[0])


def _parse(row: dict[str, Any], where: str) -> Case:
    text = row.get("text")
    kind = row.get("kind")
    flagged = row.get("flagged")
    categories = row.get("categories")
    if not isinstance(text, str) or kind not in (None, "prompt", "answer"):
        refuse(
            where,
            f"expected a text, and a kind of prompt or answer, found {row!r:.80}",
            OptionError,
        )
    if isinstance(categories, dict):
        categories = [name for name, has in categories.items() if has]
    is_well_typed = isinstance(flagged, bool | None) and isinstance(categories, list | None)
    if not is_well_typed or (flagged is None and categories is None):
        refuse(
            where,
            f"expected flagged (true or false) or a list of categories, found {row!r:.80}",
            OptionError,
        )
    unknown = [name for name in categories or () if name not in _NAMES]
    if unknown:
        msg = (
            f"{where}: expected categories among {', '.join(_NAMES)}, found {unknown[0]!r:.40}; "
            "give only flagged"
        )
        raise OptionError(msg)
    if flagged is None:
        flagged = bool(categories)
    if categories and not flagged:
        msg = (
            f"{where}: expected no categories of a text that is not flagged, found "
            f"{', '.join(categories)}"
        )
        raise OptionError(msg)
    is_complete = bool(categories) or not flagged
    right_categories = frozenset(categories or ()) if is_complete else None
    return Case(text, kind or "prompt", flagged, right_categories)
