"""Cost of the engine: the host's part of a step, and the second turn of a long chat.

    python benchmarks/inflate.py big --layers 24
    python benchmarks/serving_engine.py --model big

The host's part is the time between forward passes, with drafting, while all requests decode. The
second turn consists of the first turn, its answer and a question, so that all of it but the
question is in the KV cache. The model's context is raised to its length. Each drafter has a prompt
of its own.

    python benchmarks/serving_engine.py --model big --rounds 3 --drafters 'suffix(store_tokens=0)'

With ``--rounds``, the script compares each drafter with plain decoding instead, in turn and without
HTTP: speed, draft tokens, and the fraction of time for drafting.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from itertools import count
from pathlib import Path
from time import perf_counter

from pronk import LLM, SamplingParams
from pronk.lab.bench.prompts import builtin_prompts, encode

QUESTION = (
    "\n\nNow explain the second part of it in other words, and give an example of each step.\n"
)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, required=True, help="folder of the checkpoint")
    parser.add_argument("--drafters", default="autoregressive,suffix(store_tokens=0),draft_model")
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument(
        "--tokens", type=int, default=4000, help="length of the first turn; 0 skips turns"
    )
    parser.add_argument(
        "--rounds", type=int, default=0, help="rounds of the comparison with plain decoding"
    )
    parser.add_argument(
        "--output", type=int, default=32, help="length of each answer of the comparison"
    )
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    drafters = options.drafters.split(",")
    with tempfile.TemporaryDirectory() as folder:
        context = max(2048, 2 * options.tokens)
        model = longer(options.model.resolve(), Path(folder), context)
        llm = LLM(model, prefix_cache=True, max_batch=64, threads=options.threads)
        if options.rounds:
            compare(llm, drafters, options.requests, options.output, options.rounds)
            return
        turn_columns = "first turn | second turn | second over first"
        print(f"| drafter | host, {options.requests} requests | S | {turn_columns} |")
        print("|---|---|---|---|---|---|")
        for number, drafter in enumerate(drafters):
            share, s = host_share(llm, drafter, options.requests)
            row = f"| {drafter} | {share:.1%} | {s:.2f} |"
            if options.tokens:
                first, second = turns(llm, drafter, options.tokens, number)
                row += f" {first:.1f} s | {second:.2f} s | {second / first:.3f} |"
            print(row, flush=True)


def longer(model: Path, folder: Path, context: int) -> Path:
    """Write a copy of a model with another context length into a folder; return the folder.

    All files but ``config.json`` are links to those of the model.
    """
    for path in model.iterdir():
        (folder / path.name).symlink_to(path)
    (folder / "config.json").unlink()
    config = json.loads((model / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": context}))
    return folder


def host_share(llm: LLM, drafter: str, requests: int) -> tuple[float, float]:
    """Measure the host's part of the time while all requests decode.

    Returns:
        The fraction of time outside forward passes, and the mean number of tokens per step (S).
    """
    suite = builtin_prompts()
    prompts = [encode(llm, suite[number % len(suite)]) for number in range(requests)]
    # The first request warms up the drafter and the caches.
    llm.generate(prompts[0], SamplingParams(max_tokens=8, ignore_eos=True), drafter=drafter)
    done = llm.generate(prompts, SamplingParams(max_tokens=48, ignore_eos=True), drafter=drafter)
    every = [completion.stats.steps for completion in done]
    # All requests start together, so their clocks can be compared.
    begin = max(steps[0].clock for steps in every)
    end = min(steps[-1].clock for steps in every)
    both = [step for step in every[-1] if begin <= step.clock <= end]
    target_seconds = both[-1].target_clock - both[0].target_clock
    share = 1 - target_seconds / (both[-1].clock - both[0].clock)
    num_tokens = sum(completion.stats.generated_tokens for completion in done)
    num_steps = sum(completion.stats.target_steps for completion in done)
    return share, num_tokens / num_steps


def compare(llm: LLM, drafters: list[str], requests: int, output: int, rounds: int) -> None:
    """Print the comparison of each drafter with plain decoding.

    Each prompt begins with a number of its own, so that it is not in the prefix cache.
    """
    suite = builtin_prompts()
    numbers = count(1)
    params = SamplingParams(max_tokens=output, ignore_eos=True)
    print("| round | drafter | seconds | × plain | tokens | drafted | accepted | drafting |")
    print("|---|---|---|---|---|---|---|---|")
    for drafter in drafters:  # warm up
        llm.generate("1.", SamplingParams(max_tokens=8, ignore_eos=True), drafter=drafter)
    for turn in range(rounds):
        plain = 0.0
        for drafter in ("autoregressive", *drafters):
            prompts = list[list[int]]()
            for each in range(requests):
                number = llm.tokenizer.encode(f"{next(numbers)}.\n")
                prompts.append([*number, *encode(llm, suite[each % len(suite)])])
            began = perf_counter()
            stats = [done.stats for done in llm.generate(prompts, params, drafter=drafter)]
            seconds = perf_counter() - began
            plain = plain or seconds
            tokens = sum(each.generated_tokens for each in stats)
            drafted = sum(each.drafted for each in stats)
            accepted = sum(each.accepted for each in stats)
            drafting = max(each.draft_seconds for each in stats) / seconds
            row = f"| {turn + 1} | {drafter} | {seconds:.1f} | {plain / seconds:.2f} | {tokens} |"
            print(row, f"{drafted} | {accepted} | {drafting:.1%} |", flush=True)


def turns(llm: LLM, drafter: str, tokens: int, number: int) -> tuple[float, float]:
    """Return the seconds to the first token of the first and of the second turn.

    The first turn has ``tokens`` tokens, and begins with the drafter's ``number``.
    """
    ids = [token for prompt in builtin_prompts() for token in encode(llm, prompt)]
    copies = tokens // len(ids) + 1
    first = [*llm.tokenizer.encode(f"Chat {number}.\n"), *ids * copies][:tokens]
    params = SamplingParams(max_tokens=64, ignore_eos=True)
    answer = llm.generate(first, params, drafter=drafter)
    question = llm.tokenizer.encode(QUESTION, add_special_tokens=False)
    params = SamplingParams(max_tokens=2, ignore_eos=True)
    again = llm.generate([*first, *answer.token_ids, *question], params, drafter=drafter)
    return answer.stats.ttft, again.stats.ttft


if __name__ == "__main__":
    main()
