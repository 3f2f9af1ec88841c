"""The target's own text: beginnings of documents, continued by the decoding engine.

A draft is judged on what the target writes, so it learns from that as well. The text grows batch by batch, and the
file always holds whole batches::

    prompts.json     token ids: what the target continues, and what is held out to measure on
    on-policy.bin    the continued prompts, each followed by the end-of-text token
    on-policy.json   how many there are, and how they were made

A run with a time limit writes as much as its share of the time allows, unless the number of tokens was asked for.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from pronk.errors import OptionError
from pronk.files.atomic import write_json, write_tokens, writing
from pronk.sampling.noise import derive_seed
from pronk.sampling.params import SamplingParams
from pronk.train.batches import token_dtype
from pronk.train.chat import parse_dialogue
from pronk.train.clock import TEXT_BY, TRAINED_BY, Clock
from pronk.train.data import Collection, Pool, mix
from pronk.train.encoder import Encoder, Turns
from pronk.train.options import OnPolicyOptions
from pronk.train.resume import check_unchanged
from pronk.train.teacher import Teacher

__all__ = ["continue_prompts", "held_out_halves", "held_out_prompts", "write_prompts"]

_SHORTEST = 8  # tokens of a prompt
_CHARACTERS = 16  # per token, more than any text has: no need to encode a book for its first line
_PER_PROMPT = 4  # as many prompts as if a quarter of the length were written after each
_FEW = 8  # prompts that are continued together before the speed is known, or where there is time for less
_SURE = 3  # batches after which the speed is known
_HELD_OUT = 0.5  # share of the time that the held-out prompts may take, which come first


def write_prompts(
    collection: Collection,
    teacher: Teacher,
    options: OnPolicyOptions,
    folder: Path,
    late: Callable[[], bool] = lambda: False,
) -> None:
    """Choose prompts from what was read, in the proportions of its mixture, and short enough for the target.

    Once it is ``late``, those for one batch will do.
    """
    longest = min(options.prompt, teacher.llm.config.context // 2)
    count = max(options.batch, _PER_PROMPT * options.tokens // options.length) if options.tokens else 0
    held_out = [Pool(pool.name, pool.weight, pool.held_out) for pool in collection.pools if pool.held_out]
    prompts = {
        "recipe": _recipe(options),
        "train": _prompts(collection.pools, teacher.encoder, options.seed, count, longest, options.batch, late),
        "held_out": _prompts(held_out, teacher.encoder, options.seed, options.held_out, longest) if held_out else [],
    }
    write_json(folder / "prompts.json", prompts)


def held_out_prompts(folder: Path) -> list[list[int]]:
    """Prompts that nothing was trained on."""
    prompts: list[list[int]] = json.loads((folder / "prompts.json").read_text(encoding="utf-8"))["held_out"]
    return prompts


def held_out_halves(folder: Path, vocab_size: int) -> tuple[int, list[list[int]]] | None:
    """Held-out text for a choice and prompts to judge it by, which have nothing in common; ``None`` if there is none.

    Returns:
        How many tokens at the start of ``valid-on-policy.bin`` come from the first half of the prompts, and the other
        half.
    """
    if not (folder / "valid-on-policy.bin").exists():
        return None
    prompts = held_out_prompts(folder)
    middle = len(prompts) // 2
    tokens = np.fromfile(folder / "valid-on-policy.bin", dtype=token_dtype(vocab_size))
    # Each prompt stands in front of what was written after it, in their order.
    first = sum(len(prompt) for prompt in prompts[:middle])
    if not first:
        return None
    windows = np.lib.stride_tricks.sliding_window_view(tokens[first:], len(prompts[middle]))
    return first + int((windows == prompts[middle]).all(1).argmax()), prompts[middle:]


def _prompts(  # noqa: PLR0917 - the last two for a run in a hurry
    pools: Sequence[Pool],
    encoder: Encoder,
    seed: int,
    count: int,
    longest: int,
    least: int = 0,
    late: Callable[[], bool] = lambda: False,
) -> list[list[int]]:
    draw = random.Random(f"{seed}/prompts")  # noqa: S311 - not for secrets
    found: list[list[int]] = []
    # So many documents at most: the text may have none that is long enough.
    for text, _ in zip(mix(pools, seed, size=lambda _: 1), range(8 * count), strict=False):
        if len(found) == count or (len(found) >= least and late()):
            break
        prompt = _prompt(text, encoder, longest, draw)
        if len(prompt) >= _SHORTEST:
            found.append(prompt)
    return found


def _prompt(text: str, encoder: Encoder, longest: int, draw: random.Random) -> list[int]:
    """A prompt: a conversation up to an answer, or the beginning of a text or of one of its lines, of varied length."""
    turns = parse_dialogue(text)
    if turns is not None:
        asked: Turns = turns[: 1 + 2 * draw.randrange(len(turns) // 2)]
        ids = encoder.dialogue(asked)
        return ids if len(ids) <= longest else []
    length = round(_SHORTEST * (longest / _SHORTEST) ** draw.random())
    if draw.random() < 0.5:
        start = text.find("\n", draw.randrange(max(1, len(text) - _CHARACTERS * length)))
        text = text[start + 1 :]
    return encoder.plain([text[: _CHARACTERS * length].lstrip("\n")])[0][:length]


def continue_prompts(
    teacher: Teacher,
    folder: Path,
    options: OnPolicyOptions,
    progress: Callable[[int], None],
    stop: Callable[[], bool] = lambda: False,
    *,
    clock: Clock | None = None,
    least: int = 0,
) -> bool:
    """Let the target write until there are ``options.tokens``; returns whether there are.

    If these are the most, and ``clock`` has a limit, as many will do as its share of the time allows.

    Args:
        teacher: the target.
        folder: with ``prompts.json``; the text goes there, and is continued where it ends.
        options: how much, and how.
        progress: told the number of tokens so far.
        stop: asked between batches.
        clock: of the run.
        least: tokens that it takes in any case.

    Raises:
        OptionError: the folder's text was made with other options; or the tokens asked for take too long.
    """
    length_tracker = _Pace(options, clock or Clock(None), least)
    prompts = json.loads((folder / "prompts.json").read_text(encoding="utf-8"))
    check_unchanged(folder.parent, prompts["recipe"], _recipe(options))
    if prompts["held_out"] and not (folder / "valid-on-policy.bin").exists():
        _write_held_out(teacher, folder, prompts, options, length_tracker)
    state = _restore(folder, teacher)
    while prompts["train"] and not length_tracker.enough(state):
        if stop():
            return False
        missing = -(-(options.tokens - state["tokens"]) // options.length)
        numbers = range(state["prompts"], state["prompts"] + length_tracker.together(min(options.batch, missing)))
        rounds = [prompts["train"][number % len(prompts["train"])] for number in numbers]
        texts = length_tracker.written(_continue(teacher, rounds, options, 1 + numbers[0]))
        text = folder / "on-policy.bin"
        with writing(text, "what the target says"), text.open("ab") as file:
            file.write(_pack(iter(texts), teacher.encoder).tobytes())
        state["prompts"] += len(numbers)
        state["tokens"] += sum(len(text) for _, text in texts)
        state["bytes"] = text.stat().st_size
        # Whoever goes on with more time, or without a limit, goes on with the same text.
        state["whole"] = length_tracker.enough(state)
        write_json(folder / "on-policy.json", state)
        length_tracker.clock.save(folder)
        progress(state["tokens"])
        length_tracker.check(state["tokens"])
    return True


class _Pace:
    """How much to write, by the time that there is and the speed so far.

    Args:
        options: of the text.
        clock: of the run.
        least: tokens that it takes in any case.
    """

    def __init__(self, options: OnPolicyOptions, clock: Clock, least: int) -> None:
        self.clock, self._options, self._least = clock, options, least
        self._bounded = options.at_most and clock.limited
        self._room = max(0.0, clock.left(TEXT_BY))
        self._tokens, self._seconds, self._batches = 0, 0.0, 0

    def written(self, texts: Iterator[tuple[list[int], list[int]]]) -> list[tuple[list[int], list[int]]]:
        """The texts, whose speed is measured."""
        began = time.monotonic()
        found = list(texts)
        self._seconds += time.monotonic() - began
        self._tokens += sum(len(text) for _, text in found)
        self._batches += 1
        return found

    def enough(self, state: dict[str, Any]) -> bool:
        """Whether there is enough text."""
        if state["tokens"] >= self._options.tokens or (self._options.at_most and state.get("whole")):
            return True
        return self._bounded and state["tokens"] >= self._least and self.clock.left(TEXT_BY) <= 0

    def late(self) -> bool:
        """Whether the time for the held-out prompts is over."""
        return self._bounded and self.clock.left(TEXT_BY) <= (1 - _HELD_OUT) * self._room

    def together(self, most: int) -> int:
        """Prompts to continue together, of ``most``: as many as there is time for."""
        if not self._bounded:
            return most
        fit = int(self.clock.left(TEXT_BY) * self._speed / self._options.length)
        return min(most, max(_FEW, fit))

    def check(self, tokens: int) -> None:
        """Raise :class:`~pronk.errors.OptionError` if the rest would leave no time for anything else."""
        missing, left = self._options.tokens - tokens, self.clock.left(TRAINED_BY)
        sure = 2.0 if self._batches < _SURE else 1.2  # the first batches may have been slow
        if not self._bounded and missing > 0 and missing > sure * self._speed * left:
            fit = max(tokens, tokens + int(self._speed * left))
            msg = (
                f"on-policy: expected at most about {fit} tokens, which the target writes in "
                f"{TRAINED_BY * self.clock.limit / 60:g} minutes, found {self._options.tokens}; the same command with "
                "more --minutes goes on, or with another --out leave --on-policy out"
            )
            raise OptionError(msg)

    @property
    def _speed(self) -> float:
        """Tokens a second, 0 before the first."""
        return self._tokens / max(self._seconds, 1e-9)


def _write_held_out(
    teacher: Teacher, folder: Path, prompts: dict[str, Any], options: OnPolicyOptions, length_tracker: _Pace
) -> None:
    """Continue the held-out prompts, or as many as there is time for: the others are none any more."""
    given, texts = prompts["held_out"], list[tuple[list[int], list[int]]]()
    while len(texts) < len(given) and not (texts and length_tracker.late()):
        first = len(texts)
        some = given[first : first + length_tracker.together(len(given) - first)]
        texts += length_tracker.written(_continue(teacher, some, options, first))
    if len(texts) < len(given):
        write_json(folder / "prompts.json", prompts | {"held_out": given[: len(texts)]})
    write_tokens(folder / "valid-on-policy.bin", _pack(iter(texts), teacher.encoder))


def _continue(
    teacher: Teacher, prompts: list[list[int]], options: OnPolicyOptions, first: int
) -> Iterator[tuple[list[int], list[int]]]:
    """Each prompt with its continuation; the number of a prompt decides its temperature and its seed."""
    room = teacher.llm.config.context
    params = [
        SamplingParams(
            max_tokens=min(options.length, room - len(prompt)),
            temperature=options.temperatures[number % len(options.temperatures)],
            seed=derive_seed(options.seed, number),
        )
        for number, prompt in enumerate(prompts, first)
    ]
    for prompt, done in zip(prompts, teacher.llm.generate(prompts, params), strict=True):
        yield prompt, done.token_ids


def _pack(texts: Iterator[tuple[list[int], list[int]]], encoder: Encoder) -> np.ndarray[Any, np.dtype[Any]]:
    ids: list[int] = []
    for prompt, text in texts:
        ids += [*prompt, *text]
        ids += [encoder.end] if ids[-1] != encoder.end else []
    return np.array(ids, dtype=token_dtype(encoder.vocab_size))


def _recipe(options: OnPolicyOptions) -> dict[str, Any]:
    values = asdict(options)
    del values["at_most"]  # says nothing of how the text is made
    return {"on-policy": values.pop("tokens"), **values, "temperatures": list(options.temperatures)}


def _restore(folder: Path, teacher: Teacher) -> dict[str, Any]:
    """Where the text ends; what an interruption left behind it is cut off."""
    target = {"target": teacher.fingerprints}
    path, text = folder / "on-policy.json", folder / "on-policy.bin"
    if not path.exists():
        with writing(text, "what the target says"):
            text.write_bytes(b"")
        return {"prompts": 0, "tokens": 0, "bytes": 0, **target}
    state: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    check_unchanged(folder.parent, state, target)
    with text.open("r+b") as file:
        file.truncate(state["bytes"])
    return state
