"""Never slower than off: what guessing costs a request, and what it brings it.

The unit is a *plain step*: a request's share of a pass without guesses, which brings it a token. A step with guesses
costs what its drafter took and what its rows added to the pass, and saves a plain step with each guess that is
accepted. What was gained is a request's *credit*, which it may lose again. Beyond that it draws on a *fund* that all
requests of a drafter share: some steps at first, fed by a hundredth of every step, so that guessing is tried now and
then where it does not pay, the more seldom the dearer the try; and by what requests have gained that have ended. So for
the requests of one drafter together, at any time ::

    plain steps lost  ≤  8  +  0.01 · steps  +  0.25 · requests  +  the two dearest steps of each request

and for each of them, whatever others have gained ::

    plain steps lost  ≤  4.25  +  0.01 · its steps  +  its two dearest steps

and usually far less; but for what it takes a drafter to hear of steps that it was not asked in, if it has to
(``Proposer.observes_all_steps``): that is booked, and cannot be left out.

What it takes to start a drafter's state is not booked: that is spent when it is first asked whether to guess, and no
reason not to; neither is what prepares a drafter when it is first asked of all. What a request's first proposal costs
may be an investment, as when a draft model has to read the prompt: it is booked with the next 8, or at the end.

Who chooses among drafters takes time to decide, whom it could not afford to ask as well. So a request that has nothing
left is left alone until it may lose a plain step, then two, then four, and again from one on as soon as it has gained
something.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

__all__ = ["RequestBudget", "SharedBudget"]

# Plain steps: what a fund begins with and holds at most, what each step adds to it.
_FUND, _BANK, _SHARE = 8.0, 64.0, 0.01

# What a request has of its own, may have drawn on the fund beyond its steps' share, and most of its credit.
_OWN, _DRAWN, _CREDIT = 0.25, 4.0, 8.0

# Guesses over which the cost of the first is booked, and what of it is booked at once at least.
_TERMS, _ORDINARY = 8, 0.5

_RECENT = 5

# Half of what a request that had nothing left has to have at first before there is a choice again.
_AGAIN = 0.5


@dataclass
class SharedBudget:
    """What the requests of one drafter may lose together; it knows nothing of their texts.

    Attributes:
        left: plain steps.
        asked: what it took to ask the drafter of late, in plain steps.
        begun: whether it has ever been asked.
    """

    left: float = _FUND
    asked: deque[float] = field(default_factory=lambda: deque(maxlen=_RECENT))
    begun: bool = False

    @property
    def asking(self) -> float:
        """What asking may be expected to take."""
        return sorted(self.asked)[len(self.asked) // 2] if self.asked else 0.0

    def add(self, steps: float) -> None:
        """Put in, or take out."""
        self.left = min(_BANK, self.left + steps)


@dataclass
class RequestBudget:
    """The account of one request.

    Attributes:
        shared_budget: that it draws on.
        credit: plain steps that it has gained and not lost again.
        own: what it may lose without drawing on anything.
        drawn: what it has drawn, and not paid back.
        share: of its steps in the fund.
        invested: what its first guess cost, and was not booked yet.
        guessed: whether there was one.
        resting: whether it had nothing left, and has not got ``again`` yet.
        again: what it has to have then: twice as much each time.
    """

    shared_budget: SharedBudget
    credit: float = 0.0
    own: float = _OWN
    drawn: float = 0.0
    share: float = 0.0
    invested: float = 0.0
    guessed: bool = False
    resting: bool = False
    again: float = _AGAIN

    @property
    def left(self) -> float:
        """Plain steps that it may lose with the next step."""
        return self.credit + self.own + min(self.shared_budget.left, _DRAWN + self.share - self.drawn)

    @property
    def may_ask(self) -> bool:
        """Whether its drafter may be asked."""
        return self.left > 0.0 and self.left >= self.shared_budget.asking

    @property
    def may_choose(self) -> bool:
        """Whether there is something to decide on, for a drafter that chooses whom to ask."""
        return not self.resting and self.left > 0.0

    def settle(self, asking: float, rows: float, saved: int, hearing: float = 0.0) -> None:
        """Book a step.

        Args:
            asking: what the drafter took for its proposal, in plain steps; 0 if it was not asked.
            rows: what the guesses added to the pass, in plain steps.
            saved: guesses that were accepted.
            hearing: what it took to hear of the step, in plain steps; it hears of those, too, that it was not asked in.
        """
        self.shared_budget.add(_SHARE)
        self.share += _SHARE
        if asking:
            asking = self._invest(asking)
        self._book(saved - asking - hearing - rows)
        if self.resting:
            self.resting = self.left < self.again
        elif self.left <= 0.0:
            self.resting, self.again = True, min(_DRAWN, 2.0 * self.again)

    def close(self) -> None:
        """The request has ended: what was not booked is, and what it gained beyond that others may try with."""
        self.shared_budget.add(self.credit - self.invested)

    def _invest(self, asking: float) -> float:
        """What of the cost of asking is booked now."""
        if not self.shared_budget.begun:
            self.shared_budget.begun = self.guessed = True
            return min(asking, _ORDINARY)
        if not self.guessed:
            self.guessed = True
            self.invested = max(0.0, asking - _ORDINARY)
            return asking - self.invested
        self.shared_budget.asked.append(asking)
        part = min(self.invested, max(self.invested / _TERMS, _ORDINARY / _TERMS))
        self.invested -= part
        return asking + part

    def _book(self, net: float) -> None:
        """A step has gained so much, or lost it."""
        if net >= 0.0:
            back = min(net, self.drawn)
            self.drawn -= back
            self.shared_budget.add(back)
            if net > back:
                self.credit, self.again = min(self.credit + net - back, _CREDIT), _AGAIN
            return
        for name in ("credit", "own"):
            used = min(getattr(self, name), -net)
            setattr(self, name, getattr(self, name) - used)
            net += used
        self.drawn -= net
        self.shared_budget.add(net)
