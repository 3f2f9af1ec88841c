"""Cost and gain of guides: JSON forms relative to plain guided decoding, masks, and ``choose``.

    python benchmarks/inflate.py big --layers 24
    python benchmarks/guided.py --model big

- *Forms*: all methods decode the same text for each schema, in turn. Figures are medians of the
  ratios to plain guided decoding of the same schema and round. The tokens must be equal.
- *Masks*: microseconds of mask and advance per token, for the model's vocabulary and for a
  synthetic one of 128,000 tokens, and their fraction of a plain step.
- *choose*: time for 50 alternatives, compared with plain steps.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
from itertools import pairwise
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from pronk import LLM, Completion, Guide, SamplingParams
from pronk.models.forward_batch import ForwardBatch
from pronk.models.model_runner import ForwardResult
from pronk.sampling.grammars import Grammars
from pronk.text.guide import GuideMode
from pronk.text.tokenizer import Tokenizer

SCHEMAS = {
    "person": {
        "first_name": {"type": "string", "maxLength": 12},
        "last_name": {"type": "string", "maxLength": 12},
        "date_of_birth": {"type": "string", "pattern": "^[12][0-9]{3}-[01][0-9]-[0-3][0-9]$"},
        "email_verified": {"type": "boolean"},
        "customer_category": {"enum": ["private", "business", "public authority"]},
        "preferred_language": {"enum": ["en", "de", "fr", "es"]},
    },
    "ticket": {
        "summary": {"type": "string", "maxLength": 60},
        "severity": {"enum": ["low", "medium", "high", "critical"]},
        "affected_component": {"enum": ["frontend", "backend", "database", "network"]},
        "steps_to_reproduce": {
            "type": "array",
            "items": {"type": "string", "maxLength": 30},
            "maxItems": 3,
        },
        "reproducible": {"type": "boolean"},
        "estimated_hours": {"type": "integer", "minimum": 0, "maximum": 200},
    },
    "order": {
        "order_number": {"type": "integer", "minimum": 1, "maximum": 999999},
        "shipping_address": {
            "type": "object",
            "properties": {
                "street": {"type": "string", "maxLength": 20},
                "postal_code": {"type": "string", "pattern": "^[0-9]{5}$"},
                "country": {"enum": ["Germany", "France", "Spain", "Italy"]},
            },
            "required": ["street", "postal_code", "country"],
            "additionalProperties": False,
        },
        "items": {
            "type": "array",
            "minItems": 2,
            "maxItems": 3,
            "items": {
                "type": "object",
                "properties": {
                    "article": {"type": "string", "maxLength": 16},
                    "quantity": {"type": "integer", "minimum": 1, "maximum": 99},
                    "gift_wrapped": {"type": "boolean"},
                },
                "required": ["article", "quantity", "gift_wrapped"],
                "additionalProperties": False,
            },
        },
    },
}
METHODS: dict[str, tuple[str, GuideMode]] = {
    "plain": ("autoregressive", "plain"),
    "forced alone": ("autoregressive", "forced"),
    "jump": ("autoregressive", "jump"),
    "suffix, not forced": ("suffix(store_tokens=0)", "plain"),
    "suffix": ("suffix(store_tokens=0)", "forced"),
    "draft_model, not forced": ("draft_model", "plain"),
    "draft_model": ("draft_model", "forced"),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, required=True, help="folder of the checkpoint")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of forms; 0 skips forms")
    parser.add_argument("--temperature", type=float, default=0.8)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    llm = LLM(options.model, prefix_cache=True, threads=options.threads)
    step = forms(llm, options.rounds, options.temperature) if options.rounds else plain_step(llm)
    masks(llm, step)
    choices(llm, options.rounds, step)


def form(name: str) -> dict[str, object]:
    """Return the JSON schema with a name in ``SCHEMAS``; all its properties are required."""
    properties = SCHEMAS[name]
    return {
        "type": "object",
        "properties": properties,
        "required": [*properties],
        "additionalProperties": False,
    }


def prompt(name: str) -> str:
    """Return the prompt that asks for JSON of a schema."""
    return f"JSON schema:\n{json.dumps(form(name))}\n\nA {name} as JSON that fits it:\n"


def forms(llm: LLM, rounds: int, temperature: float) -> float:
    """Print the table of forms; return the duration of a plain step in seconds."""
    for method in METHODS.values():  # compile grammars, measure forward passes, cache the prompts
        for name in SCHEMAS:
            fill(llm, name, method, 0, temperature, most=4)
    found: dict[str, list[tuple[float, Completion]]] = {name: [] for name in METHODS}
    for turn in range(rounds):
        for name in SCHEMAS:
            for label, method in METHODS.items():
                found[label].append(fill(llm, name, method, turn, temperature))
    print("| method | × plain | S | tokens forced | forced accepted |")
    print("|---|---|---|---|---|")
    for label, runs in found.items():
        ratios = list[float]()
        for run, plain_run in zip(runs, found["plain"], strict=True):
            same = run[1].token_ids == plain_run[1].token_ids
            assert same, f"{label}: tokens differ from plain guided decoding's"
            ratios.append(tokens_per_second(run) / tokens_per_second(plain_run))
        stats = [done.stats for _, done in runs]
        tokens = sum(each.generated_tokens for each in stats)
        steps = sum(each.target_steps for each in stats)
        own = [each.sources["grammar"] for each in stats if "grammar" in each.sources]
        forced = sum(each.accepted for each in own) + sum(each.jumped for each in stats)
        drafted = sum(each.drafted for each in own)
        accepted = f"{sum(each.accepted for each in own) / drafted:.0%}" if drafted else "-"
        spread = f"{statistics.median(ratios):.2f} ({min(ratios):.2f}–{max(ratios):.2f})"
        per_pass = f"{tokens / steps:.2f}"
        print(
            f"| {label} | {spread} | {per_pass} | {forced / tokens:.0%} | {accepted} |", flush=True
        )
    compiled = [1e3 * done.stats.compile_seconds for _, done in found["plain"]]
    print(f"\ncompiled in {min(compiled):.1f} to {max(compiled):.1f} ms, once for each schema")
    return plain_step(llm)


def tokens_per_second(run: tuple[float, Completion]) -> float:
    """Return the tokens per second of a run, from its seconds and its completion."""
    seconds, done = run
    return done.stats.generated_tokens / seconds


def plain_step(llm: LLM) -> float:
    """Return the median duration of a step without draft tokens, in seconds."""
    params = SamplingParams(max_tokens=24, ignore_eos=True)
    steps = llm.generate(prompt("person"), params, drafter="autoregressive").stats.steps
    return statistics.median(after.clock - before.clock for before, after in pairwise(steps))


def fill(
    llm: LLM,
    name: str,
    method: tuple[str, GuideMode],
    seed: int,
    temperature: float,
    most: int = 160,
) -> tuple[float, Completion]:
    """Generate JSON of a schema with at most ``most`` tokens; return the seconds and the result."""
    drafter, mode = method
    params = SamplingParams(
        max_tokens=most,
        temperature=temperature,
        seed=seed,
        guide=Guide(json=form(name)),
        guide_mode=mode,
    )
    began = perf_counter()
    done = llm.generate(prompt(name), params, drafter=drafter)
    return perf_counter() - began, done


def masks(llm: LLM, step: float) -> None:
    """Print the table of masks, measured on random texts that the grammars allow."""
    columns = "mask and advance, median | slowest | share of a plain step | tokenizer read in"
    print(f"\n| vocabulary | {columns} |")
    print("|---|---|---|---|---|")
    large = Tokenizer(made_up(128_000), special_tokens={"eos_token": "<|end|>"})
    for tokenizer, size, ends in (
        (llm.tokenizer, llm.config.vocab_size, llm.config.eos_ids),
        (large, large.vocab_size, large.eos_ids),
    ):
        grammars = Grammars(tokenizer, size, ends)
        dice = random.Random(0)
        times = list[float]()
        began = perf_counter()
        grammars.compile(Guide(choice=["a"]))
        loaded = perf_counter() - began
        logits = np.random.default_rng(0).standard_normal(size, np.float32)
        for turn in range(12):
            name = [*SCHEMAS][turn % len(SCHEMAS)]
            grammar = grammars.compile(Guide(json=form(name)))
            follower = grammar.new_processor()
            for _ in range(120):
                began = perf_counter()
                masked = follower.mask(logits)
                seconds = perf_counter() - began
                token = dice.choice(np.flatnonzero(masked > -np.inf)[:2000].tolist())
                if token in ends:
                    break
                began = perf_counter()
                follower.advance(token)
                times.append(seconds + perf_counter() - began)
        median = statistics.median(times)
        durations = f"{1e6 * median:.0f} µs | {1e6 * max(times):.0f} µs"
        loading = f"{1e3 * loaded:.0f} ms"
        print(f"| {size} | {durations} | {median / step:.2%} | {loading} |", flush=True)


def made_up(size: int) -> tokenizers.Tokenizer:
    """Return a byte-level BPE tokenizer of all bytes and random words."""
    dice = random.Random(0)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {"<|end|>": 0} | {character: number for number, character in enumerate(alphabet, 1)}
    letters = "etaoinshrdlucmfwypvbgkjqxz"
    merges = list[tuple[str, str]]()
    known = [*letters, "Ġ", *"0123456789{}[]:,\"'_-."]
    while len(vocab) < size:
        left = dice.choice(known)
        right = dice.choice(known[: 26 + len(known) // 8])
        if len(left + right) < 14 and left + right not in vocab:
            vocab[left + right] = len(vocab)
            merges.append((left, right))
            known.append(left + right)
    made = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(["<|end|>"])
    return made


def choices(llm: LLM, rounds: int, step: float) -> None:
    """Print the time of ``choose`` for 50 alternatives."""
    first = "red green blue dark light".split()
    second = "house car tree stone apple road list file name sum".split()
    options = [f" {a} {b}" for a in first for b in second]
    text = prompt("order")
    llm.choose(text, options)  # now the prompt is cached, except for its last block
    forward = llm.engine.runner.forward
    passes = list[tuple[int, float]]()
    times = list[float]()

    def watched(batch: ForwardBatch, *rest: Any) -> ForwardResult:
        result = forward(batch, *rest)
        passes.append((sum(len(entry.tree) for entry in batch.entries), result.seconds))
        return result

    llm.engine.runner.forward = watched
    for _ in range(max(3, rounds)):
        passes.clear()
        began = perf_counter()
        found = llm.choose(text, options)
        times.append(perf_counter() - began)
    llm.engine.runner.forward = forward
    alone = [llm.choose(text, [option]).logprobs[0] for option in options]
    assert list(found.logprobs) == alone, "probabilities differ from those of one option at a time"
    (end, reading), *beyond = passes
    rows = " and ".join(str(each) for each, _ in beyond)
    seconds = sum(each for _, each in beyond)
    median = statistics.median(times)
    prompt_part = f"the last {end} rows of the prompt take {reading:.2f} s of it"
    print(f"\nchoose of {len(options)}: {median:.2f} s; {prompt_part},")
    steps = f"{seconds / step:.1f} plain steps"
    print(f"and a forward pass over the other {rows} rows takes the time of {steps}")


if __name__ == "__main__":
    main()
