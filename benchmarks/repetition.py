"""Fraction of a model's answers that repeat themselves, and the effect of a repetition penalty.

    python benchmarks/repetition.py --model smollm2

The short-name table (``src/pronk/checkpoint/hub/known_models.json``) has a penalty for models whose
cards recommend none although their answers loop. The script answers twenty open questions with up
to 256 tokens each, with the sampling options of the model's card and each value of ``--penalty``.

- An answer *repeats* if a sequence of four tokens occurs at least four times in it.
- An answer *loops* if a stretch of at least 24 tokens consists of four or more copies of at most 64
  tokens.
- The *share of repeats* is the fraction of all sequences of four tokens that occurred earlier in
  the same answer.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Sequence

from pronk import LLM

QUESTIONS = (
    "Write a short story about a lighthouse keeper.",
    "Explain how a bicycle stays upright.",
    "Give me ten tips for learning a language.",
    "Why is the sky blue?",
    "Write a Python function that computes Fibonacci numbers and explain it.",
    "Describe the water cycle in detail.",
    "What are the advantages and disadvantages of remote work?",
    "Write a letter to a friend about a holiday at the sea.",
    "Explain recursion to a beginner.",
    "List twenty fruits.",
    "Summarize the history of the printing press.",
    "How do I bake bread?",
    "What is the difference between a virus and a bacterium?",
    "Write a poem about autumn.",
    "Tell me about the planets of the solar system.",
    "How does a computer store numbers?",
    "Plan a week of healthy meals.",
    "Explain the rules of chess.",
    "Write a Python class for a bank account.",
    "What should I pack for a hike?",
)
LONGEST_PERIOD = 64  # maximum number of tokens of a repeated part
NUM_TOKENS = 256  # maximum number of tokens of an answer


def count_sequences(tokens: Sequence[int]) -> Counter[tuple[int, ...]]:
    """Return the number of occurrences of each sequence of four tokens."""
    return Counter(tuple(tokens[i : i + 4]) for i in range(len(tokens) - 3))


def is_loop(tokens: Sequence[int]) -> bool:
    """Return whether at least 24 consecutive tokens are four or more copies of the same part.

    The part has at most ``LONGEST_PERIOD`` tokens.
    """
    for period in range(1, LONGEST_PERIOD + 1):
        num_equal = 0  # number of consecutive tokens that equal the token one period earlier
        for i in range(period, len(tokens)):
            num_equal = num_equal + 1 if tokens[i] == tokens[i - period] else 0
            if num_equal >= max(3 * period, 24 - period):
                return True
    return False


def share_of_repeats(tokens: Sequence[int]) -> float:
    """Return the fraction of sequences of four tokens that occurred earlier in the answer."""
    counts = count_sequences(tokens)
    return 1.0 - len(counts) / max(1, counts.total())


def main() -> None:
    """Print a row for each temperature and penalty."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="folder, GGUF file or name; default: smollm2")
    parser.add_argument(
        "--penalty",
        type=float,
        nargs="+",
        default=[1.0, 1.05, 1.1, 1.2],
        help="repetition penalties",
    )
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    llm = LLM(options.model, calibration=False)
    prompts = [llm.chat_ids([{"role": "user", "content": question}]) for question in QUESTIONS]
    recommended = llm.get_default_sampling_params().temperature
    columns = f"of {len(QUESTIONS)} answers: repeat | loop | share of repeats"
    print(f"| temperature | penalty | {columns} |")
    print("| --- | --- | --- | --- | --- |")
    for temperature in sorted({0.0, recommended}):
        for penalty in options.penalty:
            params = llm.get_default_sampling_params(
                max_tokens=NUM_TOKENS,
                seed=options.seed,
                temperature=temperature,
                repetition_penalty=penalty,
            )
            answers = [completion.token_ids for completion in llm.generate(prompts, params)]
            counts = [count_sequences(each).values() for each in answers]
            num_repeating = sum(max(each, default=0) >= 4 for each in counts)
            num_loops = sum(map(is_loop, answers))
            share = sum(map(share_of_repeats, answers)) / len(answers)
            figures = f"{num_repeating} | {num_loops} | {share:.3f}"
            print(f"| {temperature} | {penalty} | {figures} |", flush=True)


if __name__ == "__main__":
    main()
