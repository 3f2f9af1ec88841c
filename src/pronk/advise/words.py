"""What to do, in sentences, and as a command."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence

from pronk.advise.facts import Facts, Raced, Rounded
from pronk.advise.race import AUTO

__all__ = ["advice", "command", "duration", "size"]

# A drafter is advised instead of auto if it is so much faster on these texts; training, if it promises so much.
_CLEARLY, _WORTH = 1.05, 1.1

# Fewer bits are advised if they are so much faster, and make the texts at most so much less likely.
_FASTER, _HARMLESS = 1.1, 1.03

# Texts of which there should be room for full ones.
_TEXTS = 4


def advice(facts: Facts) -> list[str]:
    """A paragraph for each thing that can be decided."""
    parts = (_drafter, _training, _threads, _weights, _memory)
    return [text for part in parts if (text := " ".join(part(facts)))]


def command(facts: Facts, given: Sequence[str] = ()) -> str:
    """The server with all that is advised, and options that the user has given; other commands take the same."""
    words = ["pronk", "serve", *(["--model", facts.model] if facts.model else [])]
    chosen = _chosen(facts)
    words += ["--drafter", chosen.drafter] if chosen is not None and chosen.drafter != AUTO else []
    if facts.passes is not None and facts.passes.best_threads != facts.passes.used:
        words += ["--threads", str(facts.passes.best_threads)]
    rounded = _rounded(facts)
    words += ["--weights", rounded.weights] if rounded is not None else []
    return shlex.join([*words, *given])


def _auto(facts: Facts) -> Raced | None:
    return next((each for each in facts.raced if each.drafter == AUTO), None)


def _chosen(facts: Facts) -> Raced | None:
    """Auto, or who is clearly ahead of it."""
    auto = _auto(facts)
    if auto is None or not facts.raced:
        return None
    best = facts.raced[0]
    ahead = best.times.middle > _CLEARLY * auto.times.middle and best.times.low > auto.times.middle
    return best if ahead and best.tokens > _CLEARLY else auto  # who guesses nothing is ahead by chance


def _drafter(facts: Facts) -> Iterator[str]:
    auto, chosen = _auto(facts), _chosen(facts)
    if auto is None or chosen is None:
        return
    on = f"on {facts.texts} prompts" if facts.texts > 1 else "on one prompt"
    if chosen is not auto:
        yield (
            f"Drafter: if all your texts are like these, {chosen.drafter}: {chosen.times} times plain decoding {on}, "
            f"where auto has {auto.times}."
        )
    elif auto.times.high < 1.02:
        yield f"Drafter: leave it at auto: nothing at hand is faster than plain decoding {on}; auto has {auto.times}."
    else:
        yield f"Drafter: leave it at auto, which is {auto.times} times as fast as plain decoding {on}."
        best = facts.raced[0]
        if best is not auto:
            yield f"The best single one, {best.drafter}, has {best.times}."
    if 2 * facts.looped >= facts.texts:
        yield (
            f"But {facts.looped} of the {facts.texts} texts repeat themselves, which guesses thrive on: believe it "
            "only if your users' texts do so, too; a higher --temperature is one way to others."
        )


def _training(facts: Facts) -> Iterator[str]:
    if not facts.trainable:
        return
    best, auto = facts.trainable[0], _auto(facts)
    now = max(1.0, 0.0 if auto is None else auto.times.middle)
    name = f"pronk train {best.kind}"
    hope = f"about {best.times} times plain decoding if its acceptance becomes that of pronk-tiny's drafter"
    cost = f"{duration(best.seconds)} on this machine"
    if best.times.low > _WORTH * now:
        yield f"Training: {name} would pay: {hope}, for {cost}."
    elif best.times.middle > _WORTH * now:
        yield f"Training: {name} may pay: {hope}, for {cost}."
    else:
        yield f"Training a drafter does not promise more than there is: the best, {name}, {hope}, for {cost}."


def _threads(facts: Facts) -> Iterator[str]:
    if facts.passes is None or len(facts.passes.threads) < 2:
        return
    passes, best = facts.passes, facts.passes.best_threads
    others = ", ".join(f"{count}: {1e3 * seconds:.3g}" for count, seconds in passes.threads.items())
    word = "as they are" if best == passes.used else f"--threads {best}"
    yield f"Threads: {word} (milliseconds of a plain step by threads: {others})."
    if passes.plain > 1.25 * passes.floor:
        yield f"A plain step takes {passes.plain / passes.floor:.1f} times what reading the weights takes."


def _rounded(facts: Facts) -> Rounded | None:
    """The fastest weights that change little."""
    able = [each for each in facts.rounded if each.perplexity <= _HARMLESS and each.times.low >= _FASTER]
    return max(able, key=lambda each: each.times.middle, default=None)


def _weights(facts: Facts) -> Iterator[str]:
    best = _rounded(facts)
    tried = "; ".join(
        f"{each.weights} {each.times} times as fast and perplexity × {each.perplexity:.3f}" for each in facts.rounded
    )
    if best is not None:
        yield f"Weights: --weights {best.weights}, if the model may say other things now and then: {tried}."
    elif tried:
        yield f"Weights: leave them as they are: {tried}."
    for name, why in facts.unrounded.items():
        yield f"{name} was not measured: {why}."


def _memory(facts: Facts) -> Iterator[str]:
    memory = facts.memory
    text = memory.per_token * memory.context
    yield (
        f"Memory: {size(memory.weights)} of weights, and {size(text)} of keys and values for a text of "
        f"{memory.context:,} tokens; {size(memory.free)} are free."
    )
    if memory.free < _TEXTS * text and memory.per_token_int8 < memory.per_token:
        yield f"--kv-dtype int8 needs {size(memory.per_token_int8 * memory.context)} for such a text."


def duration(seconds: float) -> str:
    """``3.5 hours``."""
    for unit, length in (("days", 86400.0), ("hours", 3600.0), ("minutes", 60.0)):
        if seconds >= 1.5 * length:
            return f"{seconds / length:.2g} {unit}"
    return f"{seconds:.0f} seconds"


def size(number: float) -> str:
    """``1.3 GB``."""
    for unit, bytes_ in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if number >= bytes_:
            return f"{number / bytes_:.3g} {unit}"
    return f"{number:.0f} B"
