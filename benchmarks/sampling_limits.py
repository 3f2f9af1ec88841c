"""Limits of the acceptance of one draft token when sampling: what a source's candidates can bring.

    python benchmarks/sampling_limits.py MODEL.gguf --prompts spec_bench.jsonl humaneval.jsonl
    python benchmarks/sampling_limits.py MODEL.gguf --prompts mbpp.jsonl --datastore STORE
    python benchmarks/sampling_limits.py MODEL.gguf --prompts mbpp.jsonl --sources recycling eagle3

The target samples an answer to each prompt at each of ``--temperatures``, alone. Before every token
of the answer but the first and the last, each source gives its *candidates* for the token, and the
draft token that its drafter proposes first. None of them is verified, so that every position
counts. The default sources are all those that the model and ``--datastore`` (a folder of ``pronk
datastore build``) allow.

Let p be the target's distribution of the token, with the temperature, and q that of the source over
its candidates: counts of the continuations of the longest match (``suffix``, ``prompt_lookup``,
``retrieval``), or softmax(stored or computed logits / temperature) (``recycling``, ``eagle3``). The
target's token is argmax(log p + g), with Gumbel noise g that is known before the forward pass. The
script prints a Markdown table with these columns:

* positions: number of positions with a candidate, and its share of all positions.
* 2+: share of these positions that have two or more candidates. Elsewhere nothing can be ranked.
* right: fraction of positions where the drafter's own first draft token is the text's token.

The other columns are means over these positions of exact probabilities that a draft token is the
target's token, given the text before it and over all noise:

* without noise: p(x), x the first draft token of a drafter that ranks without noise. For recycling
  and heads, whose drafters rank with noise, x is the token of largest q.
* with noise: argmax(log q + g), with the target's noise (:func:`coupling`).
* gain: *with noise* minus *without noise*, ± the standard error over positions.
* best power: argmax(w log q + g) for the best w of ``POWERS``, in brackets; ``inf`` is the largest
  q without noise. The best w is chosen on these positions, so that new text would have a little
  less.
* 1 - TV: the most that any drafter reaches that draws from q (:func:`overlap`).
* any: p of all candidates together. No ranking of the candidates reaches more, and q = p on the
  candidates reaches this with noise.
* max p: the most that a drafter reaches that knows p, but not the noise.

A second table has, for each w of ``POWERS``, the probability minus that of the rule that the
drafter has (bold in the first table), ± the standard error.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from policy import Prompt, read_prompts

from pronk import LLM, SamplingParams
from pronk.drafting import Eagle3, make_drafter
from pronk.drafting.from_text._growth import PythonSuffixes
from pronk.drafting.proposer import Capabilities, DraftContext, Outcome, Proposer
from pronk.sampling.tree import TokenTree

Floats = NDArray[np.float64]

# Exponents of q in the column *best power*; ``inf`` is the first candidate, without noise.
POWERS = (0.25, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 8.0, math.inf)

# Maximum number of candidates after a match, as in the default trees of the drafters.
_MAX_CHILDREN = 15
# Maximum number of matches of prompt lookup whose next tokens are counted.
_MAX_MATCHES = 32


class Candidates(NamedTuple):
    """What a source knows of the next token.

    Attributes:
        ids: different token ids, ``[n]``; the first one is drafted by a ranking without noise.
        log_q: logarithms of q, up to a constant, float64 ``[n]``.
    """

    ids: Sequence[int] | NDArray[np.int32]
    log_q: Floats


def coupling(p: Floats, q: Floats) -> float:
    """Return the probability that argmax(log p + g) and argmax(log q + g) are the same candidate.

    ``g`` is Gumbel noise, independent for each token. With exponential variables ``e`` of rate 1,
    ``argmax(log p + g)`` is ``argmin(e / p)``. Both are ``x`` if ``e(y) / e(x)`` is at least
    ``p(y) / p(x)`` and ``q(y) / q(x)`` for all other tokens ``y``, which has the probability ::

        1 / sum over all y of max(p(y) / p(x), q(y) / q(x))

    Args:
        p: the target's probabilities of the candidates, ``[n]``; their sum is at most 1, and other
            tokens have the rest.
        q: the source's weights of the candidates, ``[n]``, of any sum; others have none.
    """
    # In ascending order of q(y) / p(y), the first of both terms is larger up to x, where they are
    # equal, and the second one after it.
    ratio = np.divide(q, p, out=np.full(len(p), math.inf), where=p > 0.0)
    order = np.argsort(ratio)
    p_sorted = p[order]
    q_sorted = q[order]
    outside = max(0.0, 1.0 - float(p.sum()))
    p_until = outside + np.cumsum(p_sorted)
    q_from = np.cumsum(q_sorted[::-1])[::-1]
    chosen = (p_sorted > 0.0) & (q_sorted > 0.0)
    p_chosen = p_sorted[chosen]
    q_chosen = q_sorted[chosen]
    sums = p_until[chosen] / p_chosen + (q_from[chosen] - q_chosen) / q_chosen
    return float((1.0 / sums).sum())


def overlap(p: Floats, q: Floats) -> float:
    """Return 1 minus the total variation distance of p and q: the sum of min(p, q).

    The arguments are those of :func:`coupling`; ``q`` is divided by its sum.
    """
    return float(np.minimum(p, q / q.sum()).sum())


class Figures(NamedTuple):
    """Probabilities that one draft token of a source is the target's token, at one position.

    Attributes:
        without_noise: of the first draft token of a ranking without noise.
        by_power: of argmax(w log q + g), for each w of ``POWERS``.
        maximal: of a maximal coupling of p and q.
        any: of all candidates together.
    """

    without_noise: float
    by_power: list[float]
    maximal: float
    any: float


def figures(p: Floats, log_q: Floats, without_noise: float) -> Figures:
    """Return the figures of one position.

    Args:
        p: the target's probabilities of the candidates, ``[n]``.
        log_q: as in :class:`Candidates`; of equal ones, the first one counts as the largest.
        without_noise: as in :class:`Figures`.
    """
    relative = log_q - log_q.max()
    finite = [power for power in POWERS if power < math.inf]
    by_power = [coupling(p, np.exp(power * relative)) for power in finite]
    by_power.append(float(p[relative.argmax()]))
    return Figures(without_noise, by_power, overlap(p, np.exp(relative)), float(p.sum()))


def _counts(tokens: Sequence[tuple[int, int]]) -> Candidates | None:
    """Return candidates from pairs of a token and its count; ``None`` without any."""
    if not tokens:
        return None
    ranked = sorted(tokens, key=lambda pair: -pair[1])[:_MAX_CHILDREN]
    counts = np.array([count for _, count in ranked], np.float64)
    return Candidates([token for token, _ in ranked], np.log(counts))


def _suffix(proposer: Any, context: DraftContext[Any]) -> Candidates | None:
    """Return the continuations of the longest match in the text."""
    index = PythonSuffixes(proposer.options.max_match)
    index.extend(context.tokens)
    string = index.longest_match(context.tokens)
    return _counts(index.continuations(string)) if string else None


def _prompt_lookup(proposer: Any, context: DraftContext[Any]) -> Candidates | None:
    """Return the tokens after the longest matches; of equal counts, the latest match first."""
    matches = [*islice(context.state.matches(context.tokens[-proposer.max_ngram :]), _MAX_MATCHES)]
    longest = matches[0][0] if matches else 0
    counts = Counter(context.tokens[end] for length, end in matches if length == longest)
    return _counts([*counts.items()])


def _recycling(_: Any, context: DraftContext[Any]) -> Candidates | None:
    """Return the table's successors of the last token.

    Of a row without logits, which is known from the prompt alone, this is the first one.
    """
    table = context.state.successors
    ids = table.get(context.tokens[-1])
    logits = table.logits.get(context.tokens[-1])
    if not ids:
        return None
    if logits is None:
        return Candidates(ids[:1], np.zeros(1))
    return Candidates(ids, np.array(logits, np.float64) / context.params.temperature)


def _retrieval(proposer: Any, context: DraftContext[Any]) -> Candidates | None:
    """Return the continuations of the longest match in the datastore."""
    match = proposer.store.find(context.tokens, proposer.options.max_match)
    if match.length < proposer.options.min_match:
        return None
    children = proposer.store.children(match.low, match.high, match.length, _MAX_CHILDREN)
    return _counts([(child.token, child.high - child.low) for child in children])


def _head(proposer: Any, context: DraftContext[Any]) -> Candidates | None:
    """Return all tokens of a head, with its logits."""
    drafts = proposer.runner.begin({0: context}, 1)
    if not drafts:
        return None
    logits = drafts[0].logits[-1]
    proposer.runner.end([*drafts.values()])
    ids = np.arange(len(logits.values), dtype=np.int32) if logits.ids is None else logits.ids
    log_q = logits.values.astype(np.float64) / context.params.temperature
    best = int(log_q.argmax())
    order = np.r_[best, np.delete(np.arange(len(ids)), best)]
    return Candidates(ids[order], log_q[order])


class Source(NamedTuple):
    """A source of draft tokens.

    Attributes:
        drafter: its drafter; no source remembers earlier answers.
        candidates: function that returns the candidates at the end of a text, after the proposer
            has proposed there; ``None`` if there are none.
        uses_noise: whether the drafter ranks with the target's noise.
    """

    drafter: str
    candidates: Callable[[Any, DraftContext[Any]], Candidates | None]
    uses_noise: bool = False


SOURCES: Mapping[str, Source] = {
    "suffix": Source("suffix(store_tokens=0)", _suffix),
    "prompt_lookup": Source("prompt_lookup", _prompt_lookup),
    "recycling": Source("recycling", _recycling, uses_noise=True),
    "retrieval": Source("retrieval(datastore={!r})", _retrieval),
    "eagle3": Source("eagle3", _head, uses_noise=True),
}


class Draft(NamedTuple):
    """A source's proposal for one position."""

    token: int | None  # first draft token of the drafter; ``None`` without one
    candidates: Candidates | None


class Position(NamedTuple):
    """One position of a text.

    Attributes:
        token: the text's token.
        max_p: largest probability of a token.
        drafts: each source's proposal.
        figures: each source's result of :func:`figures`; ``None`` without candidates.
    """

    token: int
    max_p: float
    drafts: dict[str, Draft]
    figures: dict[str, Figures | None]


class Recorder(Proposer[Any]):
    """Drafter that records the candidates of several sources, and proposes none of them."""

    name = "recorder"

    def __init__(self, llm: LLM, drafters: Mapping[str, str]) -> None:
        """Bind the drafters, by the names of their sources."""
        self.names = [*drafters]
        self.parts = tuple(make_drafter(each).bind(llm.target) for each in drafters.values())
        self.capabilities = Capabilities(
            computes_features=any(part.capabilities.computes_features for part in self.parts),
            logits=True,
            bypass_budget=True,
        )
        self.target = llm.target
        self.positions: list[Position] = []
        self._drafts: dict[str, Draft] = {}

    def propose(self, contexts: Sequence[DraftContext[Any]]) -> list[TokenTree]:
        """Record the sources' proposals for the next token, and return trees without any."""
        (context,) = contexts
        for name, part, state in zip(self.names, self.parts, context.state, strict=True):
            own = context.with_state(state, max_depth=1)
            (tree,) = part.propose([own])
            token = tree.tokens[1] if len(tree.tokens) > 1 else None
            self._drafts[name] = Draft(token, SOURCES[name].candidates(part, own))
        return [TokenTree.chain(context.tokens[-1:])]

    def observe(self, outcome: Outcome[Any]) -> None:
        """Compute the figures of the position, and pass the outcome to the proposers."""
        if self._drafts and outcome.logits is not None and outcome.committed:
            self.positions.append(self._measure(outcome))
        self._drafts = {}
        for part, state in zip(self.parts, outcome.state, strict=True):
            part.observe(outcome.with_state(state))

    def _measure(self, outcome: Outcome[Any]) -> Position:
        assert outcome.logits is not None
        logits = outcome.logits[0].astype(np.float64) / outcome.params.temperature
        weights = np.exp(logits - logits.max())
        p = weights / weights.sum()
        found = dict[str, Figures | None]()
        for name, draft in self._drafts.items():
            found[name] = None
            if draft.candidates is not None:
                first = int(draft.candidates.ids[0])
                if not SOURCES[name].uses_noise and draft.token is not None:
                    first = draft.token
                own_p = p[np.asarray(draft.candidates.ids)]
                found[name] = figures(own_p, draft.candidates.log_q, float(p[first]))
        return Position(outcome.committed[0], float(p.max()), self._drafts, found)


def record(
    llm: LLM, recorder: Recorder, prompt: Prompt | list[int], params: SamplingParams
) -> tuple[list[int], list[Position]]:
    """Sample a text; return its token ids, and its positions from the second token on."""
    recorder.positions = []
    if isinstance(prompt, Prompt):
        done = llm.chat([{"role": "user", "content": prompt.text}], params, drafter=recorder)
    else:
        done = llm.generate(prompt, params, drafter=recorder)
    done.stats.check_proposer()
    return done.token_ids, recorder.positions


COLUMNS = (
    *("T", "source", "positions", "2+", "right", "without noise", "with noise", "gain"),
    *("best power", "1 - TV", "any", "max p"),
)


def figures_of(name: str, positions: Sequence[Position]) -> list[Figures]:
    """Return the figures of a source at the positions where it has candidates."""
    found = [position.figures[name] for position in positions]
    return [each for each in found if each is not None]


def own_rule(name: str, rows: Sequence[Figures]) -> Floats:
    """Return the probabilities of the rule that the source's drafter has."""
    with_noise = POWERS.index(1.0)
    if SOURCES[name].uses_noise:
        return np.array([row.by_power[with_noise] for row in rows])
    return np.array([row.without_noise for row in rows])


def difference(first: Floats, second: Floats) -> str:
    """Return the mean of paired differences, ± its standard error."""
    differences = first - second
    error = differences.std() / math.sqrt(len(differences))
    return f"{differences.mean():+.3f} ± {error:.3f}"


def table_row(temperature: float, name: str, positions: Sequence[Position]) -> list[str]:
    """Return the cells of a source's row; the rule that its drafter has is in bold type."""
    kept = [position for position in positions if position.figures[name] is not None]
    share = f"{len(kept)} ({len(kept) / max(1, len(positions)):.0%})"
    if not kept:
        return [f"{temperature:g}", name, share, *["–"] * (len(COLUMNS) - 3)]
    rows = figures_of(name, kept)
    without_noise = np.array([row.without_noise for row in rows])
    by_power = np.array([row.by_power for row in rows])
    with_noise = by_power[:, POWERS.index(1.0)]
    best = int(by_power.mean(axis=0).argmax())
    drafts = [position.drafts[name] for position in kept]
    right = [draft.token == position.token for draft, position in zip(drafts, kept, strict=True)]
    several = [draft.candidates is not None and len(draft.candidates.ids) > 1 for draft in drafts]
    rules = [f"{without_noise.mean():.3f}", f"{with_noise.mean():.3f}"]
    used = int(SOURCES[name].uses_noise)
    rules[used] = f"**{rules[used]}**"
    maximal = np.mean([row.maximal for row in rows])
    any_candidate = np.mean([row.any for row in rows])
    max_p = np.mean([position.max_p for position in kept])
    return [
        f"{temperature:g}",
        name,
        share,
        f"{np.mean(several):.0%}",
        f"{np.mean(right):.3f}",
        *rules,
        difference(with_noise, without_noise),
        f"{by_power[:, best].mean():.3f} ({POWERS[best]:g})",
        f"{maximal:.3f}",
        f"{any_candidate:.3f}",
        f"{max_p:.3f}",
    ]


def power_row(temperature: float, name: str, positions: Sequence[Position]) -> list[str]:
    """Return the cells of a source's row in the second table."""
    rows = figures_of(name, positions)
    if not rows:
        return [f"{temperature:g}", name, *["–"] * len(POWERS)]
    own = own_rule(name, rows)
    by_power = np.array([row.by_power for row in rows])
    return [f"{temperature:g}", name, *(difference(each, own) for each in by_power.T)]


def table_lines(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def find_drafters(
    llm: LLM, sources: Sequence[str] | None, datastore: Path | None
) -> dict[str, str]:
    """Return the drafters of the sources; of all that can be used, for ``None``."""
    chosen = sources
    if chosen is None:
        has_head = Eagle3().find_default(llm.target.folder, llm.config) is not None
        missing = {"eagle3": not has_head, "retrieval": datastore is None}
        chosen = [name for name in SOURCES if not missing.get(name, False)]
    if "retrieval" in chosen and datastore is None:
        sys.exit("sampling_limits: expected --datastore for retrieval, found none; build one")
    return {name: SOURCES[name].drafter.format(str(datastore)) for name in chosen}


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--prompts", type=Path, nargs="+", required=True)
    parser.add_argument("--per-suite", type=int, default=2, help="prompts of each task")
    parser.add_argument("--tokens", type=int, default=64, help="tokens of an answer")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.7, 1.0])
    parser.add_argument("--sources", nargs="+", choices=SOURCES)
    parser.add_argument("--datastore", type=Path)
    options = parser.parse_args()
    prompts = read_prompts(options.prompts, options.per_suite)
    llm = LLM(options.model, drafter="autoregressive", budget="all", threads=1)
    recorder = Recorder(llm, find_drafters(llm, options.sources, options.datastore))
    print(table_lines(COLUMNS, []), flush=True)
    power_rows = list[list[str]]()
    for temperature in options.temperatures:
        positions = list[Position]()
        for number, prompt in enumerate(prompts):
            params = SamplingParams(max_tokens=options.tokens, temperature=temperature, seed=number)
            positions += record(llm, recorder, prompt, params)[1]
            progress = f"\rT = {temperature:g}: {number + 1} of {len(prompts)} prompts"
            print(progress, end="", file=sys.stderr, flush=True)
        print(file=sys.stderr)
        for name in recorder.names:
            print(f"| {' | '.join(table_row(temperature, name, positions))} |", flush=True)
            power_rows.append(power_row(temperature, name, positions))
    print()
    print(table_lines(["T", "source", *(f"w = {power:g}" for power in POWERS)], power_rows))


if __name__ == "__main__":
    main()
