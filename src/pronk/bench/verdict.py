"""Conclusions from a benchmark in plain sentences: the fastest methods, by how much, and the losses."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pronk.bench.document import ALL, SOUND, Figures, ModelResult, Range

__all__ = ["make_verdict", "temperature_name"]

RatedFigures = tuple[Range, Figures]  # ``(figures.speedup, figures)``; the speed-up is known


def make_verdict(model: ModelResult, temperature: float) -> tuple[str, ...]:
    """Return the non-empty paragraphs about plain decoding, peers, exactness, and quality of the data."""
    verdict = _Verdict(model.figures, temperature)
    parts = (verdict.against_plain(), verdict.against_peers(), verdict.exactness(), verdict.caveats())
    return tuple(filter(None, map(" ".join, parts)))


def temperature_name(temperature: float) -> str:
    """Return ``greedy``, or ``T = 0.8``."""
    return "greedy" if temperature == 0 else f"T = {temperature:g}"


class _Verdict:
    """Sentences about the metrics at one temperature."""

    def __init__(self, figures: Sequence[Figures], temperature: float) -> None:
        self._figures = [f for f in figures if f.temperature == temperature]
        self._start = "With greedy decoding" if temperature == 0 else f"At T = {temperature:g}"
        self._overall = [f for f in self._figures if f.task == ALL]
        self._drafters = _fastest_first(f for f in self._overall if not f.is_peer and not f.is_plain)
        self._peers = _fastest_first(f for f in self._overall if f.is_peer)

    def against_plain(self) -> Iterable[str]:
        if not self._drafters:
            yield f"{self._start}, no drafter has a figure over all tasks."
            return
        speed, best = self._drafters[0]
        factor, coverage = f"{_plus_minus(speed)} times", f"over {best.prompts} of {best.asked} prompts"
        best_runs = f"the best, {best.method}, runs at {factor} its speed, {coverage}."
        yield f"{self._start}, " + _judge(
            speed,
            f"{best.method} is the fastest drafter: {factor} the speed of plain decoding, {coverage}.",
            f"no drafter is clearly faster than plain decoding: {best_runs}",
            f"every drafter loses to plain decoding: {best_runs}",
        )
        yield from self._by_task(best)
        # If the best drafter is slower than plain decoding, the first sentence already says so of every drafter.
        unmentioned = self._drafters[1:] if _judge(speed, "win", "tie", "") else []
        losers = [f"{f.method} ({s.median:.2f})" for s, f in unmentioned if _judge(s, "", "", "loss")]
        ties = [f"{f.method} ({s.median:.2f})" for s, f in unmentioned if _judge(s, "", "tie", "")]
        if losers:
            yield f"Slower than plain decoding: {_join(losers)}."
        if ties and _judge(speed, "win", "", ""):
            yield f"No clear difference from plain decoding: {_join(ties)}."

    def _by_task(self, best: Figures) -> Iterable[str]:
        tasks = _fastest_first(f for f in self._figures if f.method == best.method and f.task not in {ALL, SOUND})
        if len(tasks) < 2:
            return
        (high, fastest), (low, slowest) = tasks[0], tasks[-1]
        yield f"By task: from {low.median:.2f} times on {slowest.task} to {high.median:.2f} times on {fastest.task}."
        lost_tasks = [f.task for speed, f in tasks if _judge(speed, "", "", "loss")]
        if lost_tasks:
            yield f"It loses to plain decoding on {_join(lost_tasks)}."

    def against_peers(self) -> Iterable[str]:
        if not self._peers:
            return
        peer_speed, peer = self._peers[0]
        yield f"The best peer, {peer.method}, runs at {_plus_minus(peer_speed)} times plain decoding’s speed."
        if self._drafters and peer_speed.median > 0 and self._drafters[0][0].median > 0:
            speed, best = self._drafters[0]
            ratio = speed.median / peer_speed.median
            relative = Range(ratio, ratio * (speed.spread / speed.median + peer_speed.spread / peer_speed.median))
            verb = _judge(relative, "beats", "is level with", "loses to")
            yield f"{best.method} {verb} it: {_plus_minus(relative)} times its speed."

    def exactness(self) -> Iterable[str]:
        def ties(figures: Figures) -> str:
            return f" ({figures.near_ties} at near ties)" if figures.near_ties else ""

        others = [f for f in self._overall if not f.is_plain]
        counts = [(f, f.same, f.compared) for f in others if f.same is not None and f.compared]
        by_drafter = [(same, compared) for f, same, compared in counts if not f.is_peer]
        if by_drafter and all(same == compared for same, compared in by_drafter):
            yield f"Every drafter gave plain decoding’s tokens in all {sum(n for _, n in by_drafter)} outputs compared."
        differ = [f"{f.method} in {n - same} of {n}{ties(f)}" for f, same, n in counts if n and same < n]
        if differ:
            yield f"Other tokens than plain decoding’s, so not the same text at that speed: {_join(differ)}."

    def caveats(self) -> Iterable[str]:
        """Yield the reasons to doubt the results: repetitive text and failed prompts."""
        plain = next((f for f in self._overall if f.is_plain), None)
        if plain is not None and plain.repeated:
            yield self._repetition(plain.repeated)
        failed = [f"{f.method} on {len(f.failures)}" for f in self._overall if f.failures]
        if failed:
            yield f"Prompts that failed: {_join(failed)}."

    def _repetition(self, repeated: float) -> str:
        text = f"Of the 4-grams in plain decoding’s text {repeated:.0%} repeat, which helps methods that copy"
        best = self._drafters[0][1].method if self._drafters else None
        for f in self._figures:
            if f.task == SOUND and f.method == best and f.speedup:
                text += (
                    f"; on the {f.prompts} prompts whose output does not loop, {best} is at {_plus_minus(f.speedup)}"
                )
        return f"{text}."


def _fastest_first(figures: Iterable[Figures]) -> list[RatedFigures]:
    return sorted(((f.speedup, f) for f in figures if f.speedup), key=lambda pair: -pair[0].median)


def _judge(speed: Range, win: str, tie: str, loss: str) -> str:
    """Return ``tie`` if the ratio ``speed`` ± its spread includes 1, else ``win`` (above 1) or ``loss``.

    With empty texts the result serves as a condition: ``_judge(speed, "win", "", "")`` is true for a win only.
    """
    if abs(speed.median - 1) <= speed.spread:
        return tie
    return win if speed.median > 1 else loss


def _plus_minus(value: Range) -> str:
    """Format a median with its spread: ``2.31 ± 0.04``."""
    digits = 2 if abs(value.median) < 10 else 1 if abs(value.median) < 100 else 0
    return f"{value.median:,.{digits}f} ± {value.spread:,.{digits}f}"


def _join(parts: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(parts[:-1]), parts[-1])))
