"""Limits of the acceptance of an EAGLE-3 or MTP head: first choice, vocabulary, later tokens.

    python benchmarks/head_limits.py MODEL.gguf --prompts spec_bench.jsonl --heads HEAD OTHER_HEAD
    python benchmarks/head_limits.py MODEL.gguf --answers own.answers --heads HEAD

``--answers`` takes the held-out questions of the head's training instead of, or besides, prompts.

The target decodes each prompt greedily and alone. Before every token of the text, the head proposes
a chain of ``--depth`` tokens, and its likeliest ``TOP`` next tokens. None of them is verified, so
that every position of the text counts. The script prints a Markdown table with a row per suite:

* outside: fraction of the text's tokens that the draft vocabulary lacks; in brackets, the same
  fraction of the tokens that the first draft token missed.
* top n: fraction of positions with the text's token among the head's n likeliest ones.
* token k: fraction of positions with a right draft token k, if all earlier ones are right.
* S: mean number of tokens per forward pass, with a chain at every position.
* p: fraction of positions where the target's probability of its token is above 0.9; then *same*,
  the fraction of right first draft tokens, at these positions and at the others.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from policy import Prompt, read_prompts

from pronk import LLM, SamplingParams
from pronk.drafting import make_drafter
from pronk.drafting.proposer import Capabilities, DraftContext, Outcome, Proposer
from pronk.sampling.tree import TokenTree
from pronk.train.corpus.answers import read_answers
from pronk.train.dialogues import hold_out

TOP = 16
_SURE = 0.9  # probability of a token that the target is sure of


class Position(NamedTuple):
    """A head's draft tokens for one position of the text."""

    chain: tuple[int, ...]  # draft tokens one after another
    likeliest: tuple[int, ...]  # likeliest next tokens, the likeliest first


class Recorder(Proposer[Any]):
    """Drafter that records a head's draft tokens at every position, and proposes none of them."""

    name = "recorder"
    capabilities = Capabilities(bypass_budget=True)

    def __init__(self, llm: LLM, kind: str, head: Path, depth: int) -> None:
        model = f"model={str(head)!r}"
        chain = make_drafter(f"{kind}({model}, num_tokens={depth})")
        likeliest = make_drafter(f"{kind}({model}, num_tokens=1, num_nodes={TOP}, beam={TOP})")
        self.parts = [each.bind(llm.target) for each in (chain, likeliest)]
        self.target = llm.target
        self.positions: list[Position] = []

    @property
    def draft_ids(self) -> set[int] | None:
        """Token ids of the draft vocabulary; ``None`` if the head has the target's vocabulary."""
        ids = self.parts[0].runner.head.draft_ids  # type: ignore[attr-defined]
        return None if ids is None else {*ids.tolist()}

    def start(self, prompt: Sequence[int]) -> list[Any]:
        """Return the states of the proposers of the chain and of the likeliest tokens."""
        return [part.start(prompt) for part in self.parts]

    def propose(self, contexts: Sequence[DraftContext[Any]]) -> list[TokenTree]:
        """Record the draft tokens, and return trees without any."""
        (context,) = contexts
        drafts = list[tuple[int, ...]]()
        for part, state in zip(self.parts, context.state, strict=True):
            (tree,) = part.propose([context.with_state(state)])
            drafts.append(tuple(tree.tokens[1:]))
        self.positions.append(Position(*drafts))
        return [TokenTree.chain(context.tokens[-1:])]

    def observe(self, outcome: Outcome[Any]) -> None:
        """Do nothing."""

    def stop(self, state: list[Any]) -> None:
        """Free the states of both proposers."""
        for part, own in zip(self.parts, state, strict=True):
            part.stop(own)


class Text(NamedTuple):
    """A text and the draft tokens before each of its tokens."""

    ids: list[int]
    sure: list[bool]  # whether the target's probability of a token is above ``_SURE``
    positions: list[Position]  # draft tokens for the second token to the last but one


def record(llm: LLM, recorder: Recorder, prompt: Prompt | list[int], tokens: int) -> Text:
    """Decode a prompt greedily, and return the text with the head's draft tokens."""
    recorder.positions = []
    params = SamplingParams(max_tokens=tokens, temperature=0.0, logprobs=0)
    if isinstance(prompt, Prompt):
        done = llm.chat([{"role": "user", "content": prompt.text}], params, drafter=recorder)
    else:
        done = llm.generate(prompt, params, drafter=recorder)
    done.stats.check_proposer()
    ids = done.token_ids
    sure = [
        scores[token] > np.log(_SURE)
        for token, scores in zip(ids, done.logprobs or (), strict=True)
    ]
    return Text(ids, sure, recorder.positions)


def summary(texts: Sequence[Text], draft_ids: set[int] | None, depth: int) -> list[str]:
    """Return the cells of the row for some texts."""
    ranks = list[int]()
    outside = list[bool]()
    sure = list[bool]()
    reached = np.zeros(depth + 1, int)
    right = list[int]()
    for text in texts:
        for place, position in enumerate(text.positions, 1):
            token = text.ids[place]
            rest = text.ids[place:]
            ranks.append(position.likeliest.index(token) if token in position.likeliest else TOP)
            outside.append(draft_ids is not None and token not in draft_ids)
            sure.append(text.sure[place])
            if len(rest) >= depth and len(position.chain) == depth:
                equal = [a == b for a, b in zip(position.chain, rest[:depth], strict=True)]
                same = np.cumprod(equal)
                reached += np.array([1, *same])
                right.append(int(same.sum()))
    rank = np.array(ranks)
    out = np.array(outside)
    high = np.array(sure)
    cells = [str(len(rank)), f"{out.mean():.1%} ({out[rank > 0].mean():.1%})"]
    cells += [f"{(rank < n).mean():.3f}" for n in (1, 2, 4, 8, TOP)]
    cells += [f"{reached[k + 1] / max(1, reached[k]):.2f}" for k in range(depth)]
    cells.append(f"{1 + np.mean(right):.2f}")
    same_there = f"{(rank[high] < 1).mean():.2f}"
    same_elsewhere = f"{(rank[~high] < 1).mean():.2f}"
    cells.append(f"{high.mean():.2f}: {same_there}, {same_elsewhere}")
    return cells


def main() -> None:
    """Print one table per head."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--heads", type=Path, nargs="+", required=True)
    parser.add_argument("--kind", default="eagle3", choices=("eagle3", "mtp"))
    parser.add_argument("--prompts", type=Path, nargs="+", default=[])
    parser.add_argument("--answers", type=Path, help="file of the target's own answers")
    parser.add_argument("--per-suite", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--depth", type=int, default=6)
    options = parser.parse_args()
    suites: dict[str, list[Prompt | list[int]]] = {}
    for prompt in read_prompts(options.prompts, options.per_suite):
        suites.setdefault(prompt.suite, []).append(prompt)
    if options.answers:
        _, dialogues = read_answers(options.answers)
        _, held_out = hold_out(dialogues)
        answered = [each for each in held_out if each.answers][: options.per_suite]
        suites["held-out"] = [each.ids[: each.answers[0][0]] for each in answered]
    llm = LLM(options.model, drafter="autoregressive", budget="all", threads=1)
    columns = ["suite", "positions", "outside (rejected)"]
    columns += [f"top {n}" for n in (1, 2, 4, 8, TOP)]
    columns += [f"token {k + 1}" for k in range(options.depth)]
    columns += ["S", f"p > {_SURE}: same, same elsewhere"]
    for head in options.heads:
        recorder = Recorder(llm, options.kind, head, options.depth)
        print(f"\n{head}\n\n| {' | '.join(columns)} |\n{'|---' * len(columns)}|", flush=True)
        every: list[Text] = []
        for suite, prompts in suites.items():
            texts = [record(llm, recorder, prompt, options.tokens) for prompt in prompts]
            cells = summary(texts, recorder.draft_ids, options.depth)
            print(f"| {suite} | {' | '.join(cells)} |", flush=True)
            every += texts
        cells = summary(every, recorder.draft_ids, options.depth)
        print(f"| all | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
