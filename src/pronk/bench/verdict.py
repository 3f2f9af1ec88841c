"""What a benchmark's figures say in words: what won, what lost, and by how much."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pronk.bench.document import ALL, SOUND, Figures, Range
from pronk.bench.formats import NOTHING, plus_minus
from pronk.bench.styles import Key, Style, key_of, temperature_name

__all__ = ["Tile", "Verdict", "judge"]


@dataclass(frozen=True)
class Tile:
    """The figure of a temperature that is read first."""

    temperature: str
    value: str
    lines: tuple[str, ...]


class Verdict:
    """What the figures at one temperature say, in words."""

    def __init__(self, figures: Sequence[Figures], styles: dict[Key, Style], temperature: float) -> None:
        self._all = [f for f in figures if f.temperature == temperature]
        self._styles = styles
        self._name = temperature_name(temperature)
        measured = sorted(
            ((f.speedup, f) for f in self._all if f.task == ALL and f.speedup), key=lambda pair: -pair[0].median
        )
        self._own = [pair for pair in measured if self._kind(pair[1]) == "own"]
        self._peers = [pair for pair in measured if self._kind(pair[1]) == "peer"]

    def tile(self) -> Tile:
        """The best method's speed-up, against plain decoding and against the best peer."""
        if not self._own:
            return Tile(self._name, NOTHING, ("no drafter was measured",))
        speed, best = self._own[0]
        against = judge(speed, "faster than plain decoding", "as fast as plain decoding", "slower than plain decoding")
        lines = [f"{self._label(best)}: {against}"]
        if self._peers and self._peers[0][0].median > 0:
            peer, figures = self._peers[0]
            lines.append(f"{speed.median / peer.median:.2f}× the best peer, {self._label(figures)}")
        return Tile(self._name, f"{speed.median:.2f}×", tuple(lines))

    def paragraphs(self) -> tuple[str, ...]:
        """Plain words, the unpleasant ones included."""
        start = "With greedy decoding" if self._name == "greedy" else f"At {self._name}"
        parts = [
            self._against_plain(start) if self._own else [f"{start}, no drafter has a figure over all tasks."],
            self._against_peers(),
            self._sameness(),
            [*self._repetition(), *self._failures()],
        ]
        return tuple(filter(None, (" ".join(part) for part in parts)))

    def _against_plain(self, start: str) -> Iterable[str]:
        speed, best = self._own[0]
        name, times = self._label(best), f"{plus_minus(speed)} times"
        over = f"over {best.prompts} of {best.asked} prompts"
        start, best_runs = f"{start}, ", f"the best, {name}, runs at {times} its speed, {over}."
        yield start + judge(
            speed,
            f"{name} is the fastest drafter: {times} the speed of plain decoding, {over}.",
            f"no drafter is clearly faster than plain decoding: {best_runs}",
            f"every drafter loses to plain decoding: {best_runs}",
        )
        yield from self._by_task()
        # When the best one loses, all do, and that is said.
        rest = self._own[1:] if judge(speed, "win", "tie", "") else []
        losers = [f"{self._label(f)} ({s.median:.2f})" for s, f in rest if judge(s, "", "", "loss")]
        ties = [f"{self._label(f)} ({s.median:.2f})" for s, f in rest if judge(s, "", "tie", "")]
        if losers:
            yield f"Slower than plain decoding: {_join(losers)}."
        if ties and judge(speed, "win", "", ""):
            yield f"No clear difference from plain decoding: {_join(ties)}."

    def _by_task(self) -> Iterable[str]:
        best = self._own[0][1]
        mine = [f for f in self._all if key_of(f) == key_of(best) and f.task not in {ALL, SOUND}]
        tasks = sorted(((f.speedup, f.task) for f in mine if f.speedup), key=lambda pair: -pair[0].median)
        if len(tasks) < 2:
            return
        (most, top), (least, bottom) = tasks[0], tasks[-1]
        yield f"By task: from {least.median:.2f} times on {bottom} to {most.median:.2f} times on {top}."
        lost = [task for speed, task in tasks if judge(speed, "", "", "loss")]
        if lost:
            yield f"It loses to plain decoding on {_join(lost)}."

    def _against_peers(self) -> Iterable[str]:
        if not self._peers:
            yield "No peer has figures to compare with."
            return
        peer, figures = self._peers[0]
        yield f"The best peer, {self._label(figures)}, runs at {plus_minus(peer)} times plain decoding’s speed."
        if self._own and peer.median > 0 and self._own[0][0].median > 0:
            speed, best = self._own[0]
            ratio = speed.median / peer.median
            both = Range(ratio, ratio * (speed.spread / speed.median + peer.spread / peer.median))
            verb = judge(both, "beats", "is level with", "loses to")
            yield f"{self._label(best)} {verb} it: {plus_minus(both)} times its speed."

    def _sameness(self) -> Iterable[str]:
        counts = [
            (f, f.same, f.compared)
            for f in self._all
            if f.task == ALL and f.same is not None and f.compared and self._kind(f) != "plain"
        ]
        own = [(same, compared) for f, same, compared in counts if self._kind(f) == "own"]
        if own and all(same == compared for same, compared in own):
            yield f"Every drafter gave plain decoding’s tokens in all {sum(n for _, n in own)} outputs compared."
        differ = [f"{self._label(f)} in {n - same} of {n}{_near_ties(f)}" for f, same, n in counts if same < n]
        if differ:
            yield f"Other tokens than plain decoding’s, so not the same text at that speed: {_join(differ)}."

    def _repetition(self) -> Iterable[str]:
        plain = next((f for f in self._all if f.task == ALL and self._kind(f) == "plain"), None)
        if plain is None or not plain.repeated:
            return
        text = f"Of the 4-grams in plain decoding’s text {plain.repeated:.0%} repeat, which helps methods that copy"
        best = key_of(self._own[0][1]) if self._own else None
        for f in self._all:
            if f.task == SOUND and key_of(f) == best and f.speedup:
                text += f"; on the {f.prompts} prompts whose output does not loop, {self._label(f)} "
                text += f"is at {plus_minus(f.speedup)}"
        yield f"{text}."

    def _failures(self) -> Iterable[str]:
        failed = [f"{self._label(f)} on {len(f.failures)}" for f in self._all if f.task == ALL and f.failures]
        if failed:
            yield f"Prompts that failed: {_join(failed)}."

    def _kind(self, figures: Figures) -> str:
        return self._styles[key_of(figures)].kind

    def _label(self, figures: Figures) -> str:
        return self._styles[key_of(figures)].name


def judge(speed: Range, win: str, tie: str, loss: str) -> str:
    """Which of the three is true of a ratio: a difference within the spread is none."""
    if abs(speed.median - 1) <= speed.spread:
        return tie
    return win if speed.median > 1 else loss


def _near_ties(figures: Figures) -> str:
    return f" ({figures.near_ties} at near ties)" if figures.near_ties else ""


def _join(parts: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(parts[:-1]), parts[-1])))
