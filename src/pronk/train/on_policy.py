"""The target's own text: beginnings of documents, which the target continues.

A drafter predicts text of the target, so it also learns from this text. It is written batch by
batch into files::

    prompts.json           token ids of the prompts, for training and held out
    on-policy.bin          the training prompts with their continuations, each followed by the end-of-text token
    on-policy.json         numbers of prompts, tokens and bytes, and the target's fingerprints
    valid-on-policy.bin    the held-out prompts, likewise

With a time limit, the target writes until the fraction ``TEXT_BY`` of the limit has passed, unless
the user gave a number of tokens.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from pronk import OptionError
from pronk.base import convert_write_errors, write_json, write_text, write_tokens
from pronk.train.checkpoint import check_unchanged
from pronk.train.clock import TEXT_BY, TRAINED_BY, Clock
from pronk.train.corpus.collection import Collection, Pool
from pronk.train.corpus.encoder import Encoder, Turns, parse_dialogue, token_dtype
from pronk.train.data import mix
from pronk.train.options import OnPolicyOptions
from pronk.train.own_text import continuation_params
from pronk.train.teacher import Teacher

_MIN_PROMPT = 8  # minimum length of a prompt in tokens
# upper bound: to get n tokens of a long document, 16 n characters are encoded
_CHARACTERS_PER_TOKEN = 16
# Number of prompts, as a multiple of the number that suffices if all continuations have their
# maximum length. With 4, the prompts suffice if continuations have at least 1/4 of their maximum
# length on average.
_PROMPT_FACTOR = 4
# Minimum number of prompts per batch under a time limit. The first batch has this size, because the
# speed is unknown.
_MIN_BATCH = 8
_RELIABLE_AFTER = 3  # number of batches after which the measured speed is reliable
# fraction of the writing time for the held-out prompts, which are continued first
_HELD_OUT_SHARE = 0.5

# token ids of a prompt, and of the text that the target wrote after it
Continuation = tuple[list[int], list[int]]


def write_prompts(
    collection: Collection,
    teacher: Teacher,
    options: OnPolicyOptions,
    folder: Path,
    is_late: Callable[[], bool] = lambda: False,
) -> None:
    """Write ``prompts.json``: prompts of up to half the target's context, mixed by the sources' weights.

    ``is_late`` is called after each prompt. Once it returns true, no more than ``options.batch``
    prompts are made.
    """
    longest = min(options.prompt, teacher.llm.config.context // 2)
    count = (
        max(options.batch, _PROMPT_FACTOR * options.tokens // options.length)
        if options.tokens
        else 0
    )
    held_out = [
        Pool(pool.name, pool.weight, pool.held_out) for pool in collection.pools if pool.held_out
    ]
    prompts = {
        "recipe": _recipe(options),
        "train": _prompts(
            collection.pools, teacher.encoder, options.seed, count, longest, options.batch, is_late
        ),
        "held_out": _prompts(held_out, teacher.encoder, options.seed, options.held_out, longest)
        if held_out
        else [],
    }
    write_json(folder / "prompts.json", prompts)


def held_out_prompts(folder: Path) -> list[list[int]]:
    """Return the prompts that no drafter is trained on."""
    prompts: list[list[int]] = json.loads((folder / "prompts.json").read_text(encoding="utf-8"))[
        "held_out"
    ]
    return prompts


def held_out_halves(folder: Path, vocab_size: int) -> tuple[int, list[list[int]]] | None:
    """Split the held-out prompts: the first half for choosing a token tree, the second for measuring it.

    The result is the number of tokens at the start of ``valid-on-policy.bin`` that belong to the
    first half, and the prompts of the second half; ``None`` if there are fewer than two prompts or
    they are not continued yet.
    """
    if not (folder / "valid-on-policy.bin").exists():
        return None
    prompts = held_out_prompts(folder)
    middle = len(prompts) // 2
    tokens = np.fromfile(folder / "valid-on-policy.bin", dtype=token_dtype(vocab_size))
    # A continuation of unknown length follows each prompt, so search for the first prompt of the
    # second half.
    prompt_tokens = sum(len(prompt) for prompt in prompts[:middle])
    if not prompt_tokens:
        return None
    windows = np.lib.stride_tricks.sliding_window_view(tokens[prompt_tokens:], len(prompts[middle]))
    return prompt_tokens + int((windows == prompts[middle]).all(1).argmax()), prompts[middle:]


def _prompts(  # noqa: PLR0917 - the last two have defaults
    pools: Sequence[Pool],
    encoder: Encoder,
    seed: int,
    count: int,
    longest: int,
    min_count: int = 0,
    is_late: Callable[[], bool] = lambda: False,
) -> list[list[int]]:
    draw = random.Random(f"{seed}/prompts")  # noqa: S311 - not for secrets
    prompts: list[list[int]] = []
    # ``mix`` is endless: 8 * count ends the loop if too few documents are long enough.
    for text, _ in zip(mix(pools, seed, size=lambda _: 1), range(8 * count), strict=False):
        if len(prompts) == count or (len(prompts) >= min_count and is_late()):
            break
        prompt = _prompt(text, encoder, longest, draw)
        if len(prompt) >= _MIN_PROMPT:
            prompts.append(prompt)
    return prompts


def _prompt(text: str, encoder: Encoder, longest: int, draw: random.Random) -> list[int]:
    """Return a prompt: a dialogue up to a question, or text of random length that begins at some line."""
    turns = parse_dialogue(text)
    if turns is not None:
        question: Turns = turns[: 1 + 2 * draw.randrange(len(turns) // 2)]
        ids = encoder.encode_dialogue(question)
        return ids if len(ids) <= longest else []
    length = round(_MIN_PROMPT * (longest / _MIN_PROMPT) ** draw.random())
    if draw.random() < 0.5:
        start = text.find("\n", draw.randrange(max(1, len(text) - _CHARACTERS_PER_TOKEN * length)))
        text = text[start + 1 :]
    return encoder.encode_plain([text[: _CHARACTERS_PER_TOKEN * length].lstrip("\n")])[0][:length]


def continue_prompts(
    teacher: Teacher,
    folder: Path,
    options: OnPolicyOptions,
    progress: Callable[[int], None],
    stop: Callable[[], bool] = lambda: False,
    *,
    clock: Clock | None = None,
    min_tokens: int = 0,
) -> bool:
    """Let the target write ``options.tokens`` tokens.

    Return False if ``stop`` ended the writing early.

    With ``options.at_most`` and a time limit, writing also ends at the fraction ``TEXT_BY`` of the
    limit, but not before ``min_tokens`` tokens. A later call with the same ``folder`` goes on where
    this one ended. After each batch, ``progress`` receives the number of tokens; before each batch,
    ``stop`` is called. An OptionError is raised if the text was begun with other options, or if
    writing the given number of tokens takes too long.
    """
    writer = _Writer(options, clock or Clock(None), min_tokens)
    prompts = json.loads((folder / "prompts.json").read_text(encoding="utf-8"))
    check_unchanged(folder.parent, prompts["recipe"], _recipe(options))
    if prompts["held_out"] and not (folder / "valid-on-policy.bin").exists():
        _write_held_out(teacher, folder, prompts, writer)
    state = _restore(folder, teacher)
    while prompts["train"] and not writer.is_complete(state):
        if stop():
            return False
        missing = -(-(options.tokens - state["tokens"]) // options.length)
        numbers = range(
            state["prompts"], state["prompts"] + writer.batch_size(min(options.batch, missing))
        )
        batch = [prompts["train"][number % len(prompts["train"])] for number in numbers]
        texts = writer.continue_batch(teacher, batch, 1 + numbers[0])
        path = folder / "on-policy.bin"
        with convert_write_errors(path, "what the target says"), path.open("ab") as file:
            file.write(pack_texts(texts, teacher.encoder).tobytes())
        state["prompts"] += len(numbers)
        state["tokens"] += sum(len(text) for _, text in texts)
        state["bytes"] = path.stat().st_size
        # Record that the text is complete, so that a resumed run with a longer time limit does not
        # extend it.
        state["whole"] = writer.is_complete(state)
        write_json(folder / "on-policy.json", state)
        writer.clock.save(folder)
        progress(state["tokens"])
        writer.check(state["tokens"])
    return True


class _Writer:
    """Generates continuations, and decides by the remaining time and the measured speed how many."""

    def __init__(self, options: OnPolicyOptions, clock: Clock, min_tokens: int) -> None:
        self.clock = clock
        self._options = options
        self._min_tokens = min_tokens
        # whether the time limits the number of tokens
        self._is_time_limited = options.at_most and clock.has_limit
        self._seconds_at_start = max(0.0, clock.seconds_left(TEXT_BY))
        self._tokens = 0
        self._seconds = 0.0
        self._batches = 0

    def continue_batch(
        self, teacher: Teacher, prompts: list[list[int]], first: int
    ) -> list[Continuation]:
        """Continue ``prompts``.

        Prompt ``i`` has number ``first + i``, which selects its temperature and seed.
        """
        start = time.monotonic()
        o = self._options
        params = [
            continuation_params(
                teacher.llm,
                prompt,
                o.length,
                o.temperatures[number % len(o.temperatures)],
                o.seed,
                number,
            )
            for number, prompt in enumerate(prompts, first)
        ]
        texts = [completion.token_ids for completion in teacher.llm.generate(prompts, params)]
        self._seconds += time.monotonic() - start
        self._tokens += sum(map(len, texts))
        self._batches += 1
        return list(zip(prompts, texts, strict=True))

    def is_complete(self, state: dict[str, Any]) -> bool:
        """Return whether the text is complete; ``state`` is the content of ``on-policy.json``."""
        if state["tokens"] >= self._options.tokens or (
            self._options.at_most and state.get("whole")
        ):
            return True
        return (
            self._is_time_limited
            and state["tokens"] >= self._min_tokens
            and self.clock.seconds_left(TEXT_BY) <= 0
        )

    def held_out_time_is_over(self) -> bool:
        """Return whether the share of the writing time for the held-out prompts is over."""
        seconds_after = (1 - _HELD_OUT_SHARE) * self._seconds_at_start
        return self._is_time_limited and self.clock.seconds_left(TEXT_BY) <= seconds_after

    def batch_size(self, maximum: int) -> int:
        """Return the size of the next batch, as time permits: ``_MIN_BATCH`` to ``maximum`` prompts."""
        if not self._is_time_limited:
            return maximum
        possible = int(self.clock.seconds_left(TEXT_BY) * self._speed / self._options.length)
        return min(maximum, max(_MIN_BATCH, possible))

    def check(self, tokens: int) -> None:
        """Raise ``OptionError`` if the target would still write when training has to end."""
        missing = self._options.tokens - tokens
        left = self.clock.seconds_left(TRAINED_BY)
        # a factor; the first batches may be slow
        tolerance = 2.0 if self._batches < _RELIABLE_AFTER else 1.2
        if not self._is_time_limited and missing > 0 and missing > tolerance * self._speed * left:
            possible = max(tokens, tokens + int(self._speed * left))
            msg = (
                f"on-policy: expected at most about {possible} tokens, which the target writes in "
                f"{TRAINED_BY * self.clock.limit / 60:g} minutes, found {self._options.tokens}; "
                "the same command with "
                "more --minutes goes on, or with another --out leave --on-policy out"
            )
            raise OptionError(msg)

    @property
    def _speed(self) -> float:
        """Tokens per second so far; 0 before the first batch."""
        return self._tokens / max(self._seconds, 1e-9)


def _write_held_out(
    teacher: Teacher, folder: Path, prompts: dict[str, Any], writer: _Writer
) -> None:
    """Continue the held-out prompts.

    If time runs out, remove the other prompts from ``prompts.json``.
    """
    held_out = prompts["held_out"]
    texts = list[Continuation]()
    while len(texts) < len(held_out) and not (texts and writer.held_out_time_is_over()):
        first = len(texts)
        batch = held_out[first : first + writer.batch_size(len(held_out) - first)]
        texts += writer.continue_batch(teacher, batch, first)
    if len(texts) < len(held_out):
        write_json(folder / "prompts.json", prompts | {"held_out": held_out[: len(texts)]})
    write_tokens(folder / "valid-on-policy.bin", pack_texts(texts, teacher.encoder))


def pack_texts(texts: list[Continuation], encoder: Encoder) -> np.ndarray[Any, np.dtype[Any]]:
    """Return the tokens of prompts and texts, each text with the end-of-text token at its end."""
    ids: list[int] = []
    for prompt, text in texts:
        ids += [*prompt, *text]
        ids += [encoder.end_id] if ids[-1] != encoder.end_id else []
    return np.array(ids, dtype=token_dtype(encoder.vocab_size))


def _recipe(options: OnPolicyOptions) -> dict[str, Any]:
    values = asdict(options)
    del values["at_most"]  # a resumed run may change it: it decides only where the text ends
    return {"on-policy": values.pop("tokens"), **values, "temperatures": list(options.temperatures)}


def _restore(folder: Path, teacher: Teacher) -> dict[str, Any]:
    """Return the content of ``on-policy.json``.

    Cut an interrupted batch off the end of ``on-policy.bin``.
    """
    target = {"target": teacher.fingerprints}
    path = folder / "on-policy.json"
    text_path = folder / "on-policy.bin"
    if not path.exists():
        write_text(text_path, "", "what the target says")
        return {"prompts": 0, "tokens": 0, "bytes": 0, **target}
    state: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    check_unchanged(folder.parent, state, target)
    with text_path.open("r+b") as file:
        file.truncate(state["bytes"])
    return state
