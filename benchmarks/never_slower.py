"""Never slower than plain decoding: the cases that are made to make guessing slow.

    python benchmarks/inflate.py big --layers 24
    python benchmarks/never_slower.py --model big
    python benchmarks/never_slower.py

For each case the same texts are decoded with guesses and without, by turns, in fresh guessers with nothing learned
before the first round; the tokens are the same, which is checked. The figure is the time without over the time with:
1 is as fast, less is slower. In brackets: 90 % of resampled rounds.

- *random*: prompts of random tokens; *T = 2*: texts without any order.
- *sure and wrong*: a drafter that believes in 4 wrong guesses at each step; *50, then wrong*: the same, but for the
  first 50 tokens, where it knows the text; *slow*: takes a plain step for each proposal, and is right in every third.
- *one token*: texts of one token; *batch*: so many requests together; *context*: texts behind so many tokens.
- *a core is gone*: a second process takes one from the middle of the text on.
"""

from __future__ import annotations

import argparse
import multiprocessing
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import median

from pronk import LLM, SamplingParams
from pronk.drafters import DraftContext, Outcome, Proposer
from pronk.speculation.tree import TokenTree

PLAIN = "autoregressive"
CODE = "def area(shape):\n    return shape.width * shape.height\n\n\ndef volume(shape):\n    return"


@dataclass(frozen=True)
class Liar(Proposer[None]):
    """Knows the texts for their first tokens, and is sure of other guesses later on.

    Attributes:
        texts: by prompt.
        right: tokens for which it says what it knows.
        seconds: that a proposal takes.
        share: of the proposals behind those that are right nevertheless.
    """

    texts: dict[tuple[int, ...], list[int]] = field(default_factory=dict, hash=False, compare=False)
    right: int = 0
    seconds: float = 0.0
    share: float = 0.0

    name = "liar"

    def start(self, prompt: Sequence[int]) -> None:
        """Nothing to know."""

    def propose(self, contexts: Sequence[DraftContext[None]]) -> list[TokenTree]:
        """Four guesses."""
        until = time.perf_counter() + self.seconds
        trees = [self._tree(context) for context in contexts]
        while time.perf_counter() < until:
            pass
        return trees

    def observe(self, outcome: Outcome[None]) -> None:
        """Nothing to learn."""

    def _tree(self, context: DraftContext[None]) -> TokenTree:
        made = context.sampler.context.num_chosen
        text = self.texts[tuple(context.tokens[: len(context.tokens) - made])]
        truth, dice = text[made : made + 4], random.Random(made)
        if made >= self.right and dice.random() >= self.share:
            truth = [token + 1 for token in truth]
        chain = [context.tokens[-1], *truth][: 1 + min(context.max_depth, context.max_nodes)]
        return TokenTree.chain(chain, gain=[0.98**depth for depth in range(len(chain))])


@dataclass(frozen=True)
class Case:
    """Prompts, options, and who guesses; ``drafter`` is told the texts, and seconds of a plain step."""

    name: str
    prompts: list[list[int]]
    params: SamplingParams
    drafter: Callable[[dict[tuple[int, ...], list[int]], float], str | Proposer[None]] = lambda *_: "auto"
    disturbed: bool = False
    times: int = 1


def cases(llm: LLM, tokens: int) -> list[Case]:
    """All of them."""
    dice, vocab = random.Random(0), llm.config.vocab_size
    code = llm.tokenizer.encode(CODE)
    words = [[dice.randrange(16, vocab) for _ in range(100)] for _ in range(64)]
    plain = SamplingParams(max_tokens=tokens, temperature=0.8, seed=1, ignore_eos=True)
    wild = SamplingParams(max_tokens=tokens, temperature=2.0, seed=1, ignore_eos=True)
    one = SamplingParams(max_tokens=1, ignore_eos=True)
    long = [size for size in (100, 1000, 4000, 7800) if size + tokens <= llm.config.context]
    return [
        Case("random", words[:1], plain),
        Case("T = 2", [code], wild),
        Case("sure and wrong", [code], plain, lambda texts, _: Liar(texts)),
        Case("50, then wrong", [code], plain, lambda texts, _: Liar(texts, right=50)),
        Case("slow", [code], plain, lambda texts, step: Liar(texts, seconds=step, share=1 / 3)),
        Case("one token", words[:1], one, times=16),
        *(Case(f"batch of {size}", words[:size], wild) for size in (2, 8, 32)),
        *(Case(f"context of {size}", [(words[0] * 80)[:size]], wild) for size in long),
        Case("a core is gone", [code], wild, disturbed=True),
    ]


def decode(llm: LLM, case: Case, drafter: str | Proposer[None], *, after: float = 0.0) -> tuple[float, list[list[int]]]:
    """Seconds, and the texts; ``after`` so many seconds another process takes a core."""
    thief = multiprocessing.Process(target=partial(_steal, after), daemon=True) if after else None
    if thief is not None:
        thief.start()
    began = time.perf_counter()
    for _ in range(case.times):
        out = llm.generate(case.prompts, case.params, drafter=drafter)
    seconds = time.perf_counter() - began
    if thief is not None:
        thief.kill()
        thief.join()
    return seconds, [each.token_ids for each in out]


def _steal(after: float) -> None:
    time.sleep(after)
    while True:
        pass


def run(llm: LLM, case: Case, rounds: int) -> list[float]:
    """The ratio of each round."""
    ratios = []
    usual, texts = decode(llm, case, PLAIN)
    known = {tuple(prompt): text for prompt, text in zip(case.prompts, texts, strict=True)}
    drafter = case.drafter(known, usual / case.params.max_tokens)
    proposer = llm.get_proposer(drafter)
    for number in range(rounds):
        order = (PLAIN, proposer) if number % 2 else (proposer, PLAIN)
        seconds = {}
        for method in order:
            after = usual / 2 if case.disturbed else 0.0
            seconds[method], said = decode(llm, case, method, after=after)
            assert said == texts, f"{case.name}: other tokens"
        ratios.append(seconds[PLAIN] / seconds[proposer])
    return ratios


def interval(ratios: Sequence[float]) -> tuple[float, float]:
    """90 % of the means of resampled rounds."""
    dice = random.Random(0)
    means = sorted(sum(dice.choices(ratios, k=len(ratios))) / len(ratios) for _ in range(1000))
    return means[50], means[949]


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=192, help="of each text")
    parser.add_argument("--only", nargs="+", help="cases whose names begin so")
    args = parser.parse_args()
    llm = LLM(args.model, kv_memory="2GiB", max_batch=32)
    llm.generate(CODE, SamplingParams(max_tokens=8))
    print("| case | without / with guesses |\n|---|---|")
    for case in cases(llm, args.tokens):
        if args.only and not any(case.name.startswith(name) for name in args.only):
            continue
        ratios = run(llm, case, args.rounds)
        low, high = interval(ratios)
        print(f"| {case.name} | {median(ratios):.3f} ({low:.3f} to {high:.3f}) |", flush=True)


if __name__ == "__main__":
    main()
