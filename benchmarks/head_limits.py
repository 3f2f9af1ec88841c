"""What limits the acceptance of an EAGLE-3 or MTP head: its first choice, its vocabulary, its later draft tokens?

    python benchmarks/head_limits.py MODEL.gguf --prompts spec_bench.jsonl --heads HEAD OTHER_HEAD
    python benchmarks/head_limits.py MODEL.gguf --answers own.answers --heads HEAD

``--answers`` takes the held-out questions of the head's training instead of, or besides, prompts.

The target decodes each prompt greedily and alone. Before every token of the text, the head proposes
a chain of ``--depth`` tokens, and its likeliest ``TOP`` next tokens; none of them is verified, so
that every position of the text counts. Printed per suite, as Markdown:

* outside: share of the text's tokens that the draft vocabulary lacks; in brackets, of the rejected
  first draft tokens.
* top n: share of positions where the text's token is among the head's n likeliest ones.
* token k: share of positions where draft token k is right, given that those before it are.
* S: tokens per forward pass of the chain at every position.
* p: share of positions where the target's probability of its token is above 0.9, and *same* there
  and elsewhere.
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
    """Draft tokens before a token of the text."""

    chain: tuple[int, ...]
    likeliest: tuple[int, ...]


class Recorder(Proposer[Any]):
    """Keeps a head's draft tokens at every position, and proposes none of them."""

    name = "recorder"
    capabilities = Capabilities(bypass_budget=True)

    def __init__(self, llm: LLM, kind: str, head: Path, depth: int) -> None:
        specs = f"num_tokens={depth}", f"num_tokens=1, num_nodes={TOP}, beam={TOP}"
        self.parts = [
            make_drafter(f"{kind}(model={str(head)!r}, {spec})").bind(llm.target) for spec in specs
        ]
        self.target = llm.target
        self.positions: list[Position] = []

    @property
    def draft_ids(self) -> set[int] | None:
        """The draft vocabulary; ``None`` if it is the target's."""
        ids = self.parts[0].runner.head.draft_ids  # type: ignore[attr-defined]
        return None if ids is None else {*ids.tolist()}

    def start(self, prompt: Sequence[int]) -> list[Any]:
        """Return the states of both proposers."""
        return [part.start(prompt) for part in self.parts]

    def propose(self, contexts: Sequence[DraftContext[Any]]) -> list[TokenTree]:
        """Record, and propose nothing."""
        (context,) = contexts
        chain, top = (
            part.propose([context.with_state(state)])[0].tokens[1:]
            for part, state in zip(self.parts, context.state, strict=True)
        )
        self.positions.append(Position(tuple(chain), tuple(top)))
        return [TokenTree.chain(context.tokens[-1:])]

    def observe(self, outcome: Outcome[Any]) -> None:
        """Do nothing."""

    def stop(self, state: list[Any]) -> None:
        """Free both states."""
        for part, own in zip(self.parts, state, strict=True):
            part.stop(own)


class Text(NamedTuple):
    """A text and the draft tokens before each of its tokens."""

    ids: list[int]
    sure: list[bool]  # per token
    positions: list[Position]  # of the tokens from the second one to the last but one


def record(llm: LLM, recorder: Recorder, prompt: Prompt | list[int], tokens: int) -> Text:
    """Decode a prompt."""
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
    """Return the cells of a row."""
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
                same = np.cumprod(
                    [a == b for a, b in zip(position.chain, rest[:depth], strict=True)]
                )
                reached += np.array([1, *same])
                right.append(int(same.sum()))
    rank = np.array(ranks)
    out = np.array(outside)
    high = np.array(sure)
    cells = [str(len(rank)), f"{out.mean():.1%} ({out[rank > 0].mean():.1%})"]
    cells += [f"{(rank < n).mean():.3f}" for n in (1, 2, 4, 8, TOP)]
    cells += [f"{reached[k + 1] / max(1, reached[k]):.2f}" for k in range(depth)]
    cells += [f"{1 + np.mean(right):.2f}"]
    return [
        *cells,
        f"{high.mean():.2f}: {(rank[high] < 1).mean():.2f}, {(rank[~high] < 1).mean():.2f}",
    ]


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
        dialogues = [each for each in hold_out(read_answers(options.answers)[1])[1] if each.answers]
        suites["held-out"] = [
            each.ids[: each.answers[0][0]] for each in dialogues[: options.per_suite]
        ]
    llm = LLM(options.model, drafter="autoregressive", budget="all", threads=1)
    columns = ["suite", "positions", "outside (rejected)", *(f"top {n}" for n in (1, 2, 4, 8, TOP))]
    columns += [
        *(f"token {k + 1}" for k in range(options.depth)),
        "S",
        f"p > {_SURE}: same, same elsewhere",
    ]
    for head in options.heads:
        recorder = Recorder(llm, options.kind, head, options.depth)
        print(f"\n{head}\n\n| {' | '.join(columns)} |\n{'|---' * len(columns)}|", flush=True)
        every: list[Text] = []
        for suite, prompts in suites.items():
            texts = [record(llm, recorder, prompt, options.tokens) for prompt in prompts]
            print(
                f"| {suite} | {' | '.join(summary(texts, recorder.draft_ids, options.depth))} |",
                flush=True,
            )
            every += texts
        print(
            f"| all | {' | '.join(summary(every, recorder.draft_ids, options.depth))} |", flush=True
        )


if __name__ == "__main__":
    main()
