"""The target's own text: beginnings of documents, which the target continues.

A drafter predicts the target's text, so it is also trained on text that the target has written. The
text is written batch by batch into files of the run's folder::

    prompts.json           token ids of the prompts, for training and held out
    on-policy.bin          the training prompts with their continuations, and an end-of-text token
                           after each
    on-policy.json         numbers of prompts, tokens and bytes, and the target's fingerprints
    valid-on-policy.bin    the held-out prompts with their continuations, likewise

With a time limit, the target writes until the fraction ``TEXT_BY`` of the limit has passed, unless
the user gave a number of tokens.
"""

from __future__ import annotations

import json
import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from pronk import OptionError, SamplingParams
from pronk.base import convert_write_errors, write_json, write_text, write_tokens
from pronk.train.checkpoint import check_unchanged
from pronk.train.clock import TEXT_BY, TRAINED_BY, Clock
from pronk.train.corpus.collection import Collection, Pool
from pronk.train.corpus.encoder import Encoder, Turns, parse_dialogue, token_dtype
from pronk.train.data import mix
from pronk.train.options import OnPolicyOptions
from pronk.train.own_text import continuation_params
from pronk.train.teacher import Teacher

_MIN_PROMPT = 8  # minimum number of tokens of a prompt
# Maximum number of characters per token: for a prompt of n tokens, 16 n characters of a long
# document are encoded.
_CHARACTERS_PER_TOKEN = 16
# Number of prompts that are made, as a multiple of the number that suffices if all continuations
# have the maximum length. With 4, the prompts suffice if the mean length is at least 1/4 of the
# maximum.
_PROMPT_FACTOR = 4
# Number of prompts of the first batch under a time limit, when the speed is unknown; later batches
# have at least as many.
_MIN_BATCH = 8
_RELIABLE_AFTER = 3  # number of batches after which the measured speed is reliable
# Fraction of the writing time that the held-out prompts may take; they are continued first.
_HELD_OUT_SHARE = 0.5

# Token ids of a prompt, and token ids of the text that the target wrote after it.
Continuation = tuple[list[int], list[int]]


def write_prompts(
    collection: Collection,
    teacher: Teacher,
    options: OnPolicyOptions,
    folder: Path,
    is_late: Callable[[], bool] = lambda: False,
) -> None:
    """Write ``prompts.json``: beginnings of documents, mixed by the weights of the sources.

    A prompt has at most half the target's context. ``is_late`` is called after each prompt; once it
    returns True, no more than ``options.batch`` prompts are made.
    """
    longest = min(options.prompt, teacher.llm.config.context // 2)
    count = 0
    if options.tokens:
        count = max(options.batch, _PROMPT_FACTOR * options.tokens // options.length)
    encoder = teacher.encoder
    pools = collection.pools
    seed = options.seed
    train = _prompts(pools, encoder, seed, count, longest, options.batch, is_late)
    held_out_pools = [
        Pool(pool.name, pool.weight, pool.held_out) for pool in pools if pool.held_out
    ]
    held_out: list[list[int]] = []
    if held_out_pools:
        held_out = _prompts(held_out_pools, encoder, seed, options.held_out, longest)
    prompts = {"recipe": _recipe(options), "train": train, "held_out": held_out}
    write_json(folder / "prompts.json", prompts)


def held_out_prompts(folder: Path) -> list[list[int]]:
    """Return the token ids of the held-out prompts in ``prompts.json``."""
    document = json.loads((folder / "prompts.json").read_text(encoding="utf-8"))
    prompts: list[list[int]] = document["held_out"]
    return prompts


def held_out_halves(folder: Path, vocab_size: int) -> tuple[int, list[list[int]]] | None:
    """Split the held-out prompts: one half to choose a token tree, the other to measure it.

    Returns the number of tokens at the start of ``valid-on-policy.bin`` that belong to the first
    half, and the prompts of the second half. ``None`` if there are fewer than two prompts, or if
    the prompts are not continued yet.
    """
    if not (folder / "valid-on-policy.bin").exists():
        return None
    prompts = held_out_prompts(folder)
    middle = len(prompts) // 2
    tokens = np.fromfile(folder / "valid-on-policy.bin", dtype=token_dtype(vocab_size))
    # A continuation of unknown length follows each prompt, so the first prompt of the second half
    # is searched for in the text.
    prompt_tokens = sum(len(prompt) for prompt in prompts[:middle])
    if not prompt_tokens:
        return None
    wanted = prompts[middle]
    windows = np.lib.stride_tricks.sliding_window_view(tokens[prompt_tokens:], len(wanted))
    place = int((windows == wanted).all(1).argmax())
    return prompt_tokens + place, prompts[middle:]


def _prompts(  # noqa: PLR0917 - the last two have defaults
    pools: Sequence[Pool],
    encoder: Encoder,
    seed: int,
    count: int,
    longest: int,
    min_count: int = 0,
    is_late: Callable[[], bool] = lambda: False,
) -> list[list[int]]:
    """Return ``count`` prompts, which are beginnings of documents in ``pools``.

    Args:
        pools: documents by source.
        encoder: converter of text to token ids.
        seed: seed of the choice.
        count: number of prompts; there are fewer if too few documents are long enough.
        longest: maximum number of tokens of a prompt.
        min_count: minimum number of prompts before ``is_late`` ends the choice.
        is_late: returns whether time is short.
    """
    draw = random.Random(f"{seed}/prompts")  # noqa: S311 - not for secrets
    prompts: list[list[int]] = []
    # ``mix`` repeats documents endlessly. The limit 8 * count ends the loop if too few documents
    # are long enough.
    for text in islice(mix(pools, seed, size=lambda _: 1), 8 * count):
        if len(prompts) == count or (len(prompts) >= min_count and is_late()):
            break
        prompt = _prompt(text, encoder, longest, draw)
        if len(prompt) >= _MIN_PROMPT:
            prompts.append(prompt)
    return prompts


def _prompt(text: str, encoder: Encoder, longest: int, draw: random.Random) -> list[int]:
    """Return a prompt: a dialogue up to a question, or text of random length from a line on.

    The result is empty for a dialogue longer than ``longest`` tokens.
    """
    turns = parse_dialogue(text)
    if turns is not None:
        question: Turns = turns[: 1 + 2 * draw.randrange(len(turns) // 2)]
        ids = encoder.encode_dialogue(question)
        return ids if len(ids) <= longest else []
    length = round(_MIN_PROMPT * (longest / _MIN_PROMPT) ** draw.random())
    if draw.random() < 0.5:
        start = text.find("\n", draw.randrange(max(1, len(text) - _CHARACTERS_PER_TOKEN * length)))
        text = text[start + 1 :]
    beginning = text[: _CHARACTERS_PER_TOKEN * length].lstrip("\n")
    (ids,) = encoder.encode_plain([beginning])
    return ids[:length]


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
    """Let the target write ``options.tokens`` tokens; return False if ``stop`` ended the writing.

    With ``options.at_most`` and a time limit, writing also ends at the fraction ``TEXT_BY`` of the
    limit, but not before ``min_tokens`` tokens. A later call with the same ``folder`` goes on where
    this one ended. ``progress`` is called with the number of tokens after each batch, ``stop``
    before each batch. Raises OptionError if the text was begun with other options, or if writing
    the given number of tokens takes too long.
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
        num_missing = math.ceil((options.tokens - state["tokens"]) / options.length)
        size = writer.batch_size(min(options.batch, num_missing))
        numbers = range(state["prompts"], state["prompts"] + size)
        batch = [prompts["train"][number % len(prompts["train"])] for number in numbers]
        texts = writer.continue_batch(teacher, batch, 1 + numbers[0])
        path = folder / "on-policy.bin"
        with convert_write_errors(path, "what the target says"), path.open("ab") as file:
            file.write(pack_texts(texts, teacher.encoder).tobytes())
        state["prompts"] += len(numbers)
        state["tokens"] += sum(len(text) for _, text in texts)
        state["bytes"] = path.stat().st_size
        # Store that the text is complete, so that a resumed run with a longer time limit does not
        # extend it.
        state["whole"] = writer.is_complete(state)
        write_json(folder / "on-policy.json", state)
        writer.clock.save(folder)
        progress(state["tokens"])
        writer.check(state["tokens"])
    return True


class _Writer:
    """Lets the target continue prompts, as many as remaining time and measured speed permit."""

    def __init__(self, options: OnPolicyOptions, clock: Clock, min_tokens: int) -> None:
        self.clock = clock
        self._options = options
        self._min_tokens = min_tokens
        # Whether the time limit may end the text before it has all its tokens.
        self._is_time_limited = options.at_most and clock.has_limit
        self._seconds_at_start = max(0.0, clock.seconds_left(TEXT_BY))
        self._tokens = 0
        self._seconds = 0.0
        self._batches = 0

    def continue_batch(
        self, teacher: Teacher, prompts: list[list[int]], first: int
    ) -> list[Continuation]:
        """Return each of ``prompts`` with the text that the target generates after it.

        Prompt ``i`` of the list has number ``first + i``, which determines its temperature and
        seed.
        """
        start = time.monotonic()
        o = self._options
        params: list[SamplingParams] = []
        for number, prompt in enumerate(prompts, first):
            temperature = o.temperatures[number % len(o.temperatures)]
            params.append(
                continuation_params(teacher.llm, prompt, o.length, temperature, o.seed, number)
            )
        texts = [completion.token_ids for completion in teacher.llm.generate(prompts, params)]
        self._seconds += time.monotonic() - start
        self._tokens += sum(map(len, texts))
        self._batches += 1
        return list(zip(prompts, texts, strict=True))

    def is_complete(self, state: dict[str, Any]) -> bool:
        """Return whether the target has written all of its text.

        ``state`` is the content of ``on-policy.json``.
        """
        if state["tokens"] >= self._options.tokens:
            return True
        if self._options.at_most and state.get("whole"):
            return True
        if not self._is_time_limited or state["tokens"] < self._min_tokens:
            return False
        return self.clock.seconds_left(TEXT_BY) <= 0

    def held_out_time_is_over(self) -> bool:
        """Return whether the held-out prompts have used up their share of the writing time."""
        seconds_after = (1 - _HELD_OUT_SHARE) * self._seconds_at_start
        return self._is_time_limited and self.clock.seconds_left(TEXT_BY) <= seconds_after

    def batch_size(self, maximum: int) -> int:
        """Return the number of prompts in the next batch: ``maximum``, or less if time is short."""
        if not self._is_time_limited:
            return maximum
        possible = int(self.clock.seconds_left(TEXT_BY) * self._speed / self._options.length)
        return min(maximum, max(_MIN_BATCH, possible))

    def check(self, tokens: int) -> None:
        """Raise ``OptionError`` if the target cannot write its text before training has to end.

        ``tokens`` is the number of tokens that exist.
        """
        missing = self._options.tokens - tokens
        left = self.clock.seconds_left(TRAINED_BY)
        # The first batches may be slow, so at first a longer estimate is tolerated.
        tolerance = 2.0 if self._batches < _RELIABLE_AFTER else 1.2
        if not self._is_time_limited and missing > 0 and missing > tolerance * self._speed * left:
            possible = max(tokens, tokens + int(self._speed * left))
            msg = (
                f"on-policy: expected at most about {possible} tokens, which the target writes in "
                f"{TRAINED_BY * self.clock.limit / 60:g} minutes, found {self._options.tokens}; "
                "the same command with more --minutes goes on, or with another --out leave "
                "--on-policy out"
            )
            raise OptionError(msg)

    @property
    def _speed(self) -> float:
        """Tokens per second that the target has written so far; 0 before the first batch."""
        return self._tokens / max(self._seconds, 1e-9)


def _write_held_out(
    teacher: Teacher, folder: Path, prompts: dict[str, Any], writer: _Writer
) -> None:
    """Continue the held-out prompts.

    Prompts for which there is no time are removed from ``prompts.json``.
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
    """Return the token ids of all prompts and texts, with an end-of-text token after each text."""
    ids: list[int] = []
    for prompt, text in texts:
        ids += [*prompt, *text]
        if ids[-1] != encoder.end_id:
            ids.append(encoder.end_id)
    return np.array(ids, dtype=token_dtype(encoder.vocab_size))


def _recipe(options: OnPolicyOptions) -> dict[str, Any]:
    """Return the options that must be unchanged when a run is resumed, by name."""
    values = asdict(options)
    del values["at_most"]  # only decides where the text ends
    return {"on-policy": values.pop("tokens"), **values, "temperatures": list(options.temperatures)}


def _restore(folder: Path, teacher: Teacher) -> dict[str, Any]:
    """Return the content of ``on-policy.json``, for a run that is resumed.

    An incomplete batch at the end of ``on-policy.bin`` is cut off.
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
