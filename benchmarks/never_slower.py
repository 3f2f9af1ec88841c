"""Speed of drafting relative to plain decoding, in cases that are built to make drafting slow.

    python benchmarks/never_slower.py --model MODEL.gguf
    python benchmarks/never_slower.py --model MODEL.gguf --wall      # by the wall clock

Each case decodes the same texts with and without draft tokens, in turn, and the script checks that
the tokens are equal. The figure is the time without draft tokens divided by the time with them:
less than 1 is slower. Brackets have the 90 % interval over resampled rounds. Times are those of
``priced.py``, unless ``--wall`` is set.

- *random*: prompts of random tokens. *T = 2*: texts without any structure.
- *sure and wrong*: the drafter proposes 4 wrong tokens per step with high confidence. *50, then
  wrong*: the same after 50 correct tokens. *slow*: each proposal takes as long as a plain step, and
  a third of the proposals are correct.
- *one token*: texts of one token. *batch of N*: N requests together. *context of N*: texts after N
  prompt tokens.
- *a core is gone*: from the middle of the text on, forward passes take twice as long, or with
  ``--wall`` a second process keeps a core busy.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import median

from priced import PricedClock

from pronk import LLM, SamplingParams
from pronk.drafting import DraftContext, Outcome, Proposer
from pronk.sampling.tree import TokenTree

Texts = dict[tuple[int, ...], list[int]]  # token ids of a text by those of its prompt

PLAIN = "autoregressive"
CODE = "def area(shape):\n    return shape.width * shape.height\n\n\ndef volume(shape):\n    return"


@dataclass(frozen=True)
class WrongProposer(Proposer[None]):
    """Drafter whose tokens are correct at the beginning of a text, and wrong afterwards.

    All tokens have a high confidence.

    Attributes:
        texts: correct texts by prompt.
        right: number of tokens at the beginning of a text with correct proposals.
        seconds: duration of a proposal.
        share: fraction of correct proposals after the beginning.
        clock: clock that measures ``seconds``.
    """

    texts: Texts = field(default_factory=dict, hash=False, compare=False)
    right: int = 0
    seconds: float = 0.0
    share: float = 0.0
    clock: Callable[[], float] = field(default=time.perf_counter, hash=False, compare=False)

    name = "wrong"

    def start(self, prompt: Sequence[int]) -> None:
        """Return no state."""

    def propose(self, contexts: Sequence[DraftContext[None]]) -> list[TokenTree]:
        """Propose four tokens for each request, in at least ``seconds`` seconds."""
        until = self.clock() + self.seconds
        trees = [self._tree(context) for context in contexts]
        while self.clock() < until:
            pass
        return trees

    def observe(self, outcome: Outcome[None]) -> None:
        """Ignore the result of the verification."""

    def _tree(self, context: DraftContext[None]) -> TokenTree:
        made = context.sampler.context.num_generated
        text = self.texts[tuple(context.tokens[: len(context.tokens) - made])]
        truth = text[made : made + 4]
        dice = random.Random(made)
        if made >= self.right and dice.random() >= self.share:
            truth = [token + 1 for token in truth]
        chain = [context.tokens[-1], *truth][: 1 + min(context.max_depth, context.max_nodes)]
        return TokenTree.chain(chain, gain=[0.98**depth for depth in range(len(chain))])


@dataclass(frozen=True)
class Case:
    """A case to measure.

    Attributes:
        name: name in the table.
        prompts: token ids.
        params: options of the requests.
        drafter: returns the drafter; called with the correct texts by prompt, and the seconds of a
            plain step.
        disturbed: whether another process keeps a core busy.
        times: number of repetitions per measurement.
    """

    name: str
    prompts: list[list[int]]
    params: SamplingParams
    drafter: Callable[[Texts, float], str | Proposer[None]] = lambda *_: "auto"
    disturbed: bool = False
    times: int = 1


def cases(llm: LLM, tokens: int) -> list[Case]:
    """Return all cases, with texts of ``tokens`` tokens."""
    dice = random.Random(0)
    vocab = llm.config.vocab_size
    code = llm.tokenizer.encode(CODE)
    words = [[dice.randrange(16, vocab) for _ in range(100)] for _ in range(64)]
    plain = SamplingParams(max_tokens=tokens, temperature=0.8, seed=1, ignore_eos=True)
    wild = SamplingParams(max_tokens=tokens, temperature=2.0, seed=1, ignore_eos=True)
    one = SamplingParams(max_tokens=1, ignore_eos=True)
    long = [size for size in (100, 1000, 4000, 7800) if size + tokens <= llm.config.context]
    return [
        Case("random", words[:1], plain),
        Case("T = 2", [code], wild),
        Case("sure and wrong", [code], plain, lambda texts, _: WrongProposer(texts)),
        Case("50, then wrong", [code], plain, lambda texts, _: WrongProposer(texts, right=50)),
        Case(
            "slow",
            [code],
            plain,
            lambda texts, step: WrongProposer(texts, 0, step, 1 / 3, llm.engine.runner.clock),
        ),
        Case("one token", words[:1], one, times=16),
        *(Case(f"batch of {size}", words[:size], wild) for size in (2, 8, 32)),
        *(Case(f"context of {size}", [(words[0] * 80)[:size]], wild) for size in long),
        Case("a core is gone", [code], wild, disturbed=True),
    ]


def decode(
    llm: LLM, case: Case, drafter: str | Proposer[None], *, after: float = 0.0
) -> tuple[float, list[list[int]]]:
    """Decode the texts of a case; return the seconds and the token ids.

    Another process keeps a core busy from ``after`` seconds on; never, if ``after`` is 0.
    """
    clock = llm.engine.runner.clock
    busy = None
    if after and isinstance(clock, PricedClock):
        clock.slow_from = clock() + after
    elif after:
        busy = multiprocessing.Process(target=partial(_occupy_core, after), daemon=True)
        busy.start()
    began = clock()
    for _ in range(case.times):
        out = llm.generate(case.prompts, case.params, drafter=drafter)
    seconds = clock() - began
    if isinstance(clock, PricedClock):
        clock.slow_from = math.inf
    if busy is not None:
        busy.kill()
        busy.join()
    return seconds, [each.token_ids for each in out]


def _occupy_core(after: float) -> None:
    time.sleep(after)
    while True:
        pass


def run(llm: LLM, case: Case, rounds: int) -> list[float]:
    """Return the ratio of the times without and with draft tokens in each round.

    The tokens of both must be equal.
    """
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
            assert said == texts, f"{case.name}: tokens differ from plain decoding's"
        ratios.append(seconds[PLAIN] / seconds[proposer])
    return ratios


def interval(ratios: Sequence[float]) -> tuple[float, float]:
    """Return the 90 % interval of the mean over resampled rounds."""
    dice = random.Random(0)
    count = len(ratios)
    means = sorted(sum(dice.choices(ratios, k=count)) / count for _ in range(1000))
    return means[50], means[949]


def main() -> None:
    """Run the measurements, and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=192, help="length of each text")
    parser.add_argument("--wall", action="store_true", help="use the wall clock")
    parser.add_argument("--only", nargs="+", help="beginnings of the names of cases")
    args = parser.parse_args()
    llm = LLM(args.model, kv_memory="2GiB", max_batch=32, drafter=PLAIN)
    clock = PricedClock()
    if not args.wall:
        clock.attach(llm)
    with clock.installed(only=not args.wall):
        llm.generate(CODE, SamplingParams(max_tokens=8), drafter="auto")
        print("| case | time without / with draft tokens |\n|---|---|")
        for case in cases(llm, args.tokens):
            if args.only and not any(case.name.startswith(name) for name in args.only):
                continue
            ratios = run(llm, case, args.rounds)
            low, high = interval(ratios)
            print(f"| {case.name} | {median(ratios):.3f} ({low:.3f} to {high:.3f}) |", flush=True)


if __name__ == "__main__":
    main()
