"""The target's own dialogues: the deployed target answers questions made from documents.

A target without a chat format continues beginnings of documents instead.

Half of the dialogues are greedy, because the deployed model is often asked for its most likely
text; the others are sampled. The text of a dialogue depends on its number, not on the batch or the
drafter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from itertools import count, islice
from math import inf
from pathlib import Path

from pronk import LLM, OptionError, PromptError, SamplingParams
from pronk.checkpoint import Fingerprint
from pronk.drafting import derive_seed
from pronk.train.corpus.answers import (
    BEGINNINGS,
    QUESTIONS,
    AnswersHeader,
    AnswersWriter,
    Dialogue,
)
from pronk.train.corpus.encoder import Encoder
from pronk.train.corpus.sources import SourceSpec

_TEMPERATURES = (0.0, 0.7, 0.0, 1.0, 0.0, 0.8)  # the dialogues have these temperatures in turn
# Number of dialogues that one call generates, as a multiple of the batch. As it is several times
# the batch, forward passes are full until the last dialogues. The first call generates one batch,
# so that the user soon sees how long the others will take.
_GROUP = 4
_MIN_ANSWER = 4  # minimum number of tokens of an answer; shorter ones are not trained on
# number of successive questions that may be excluded before the command gives up
_MAX_SKIPPED = 10_000
# minimum number of successive questions without an answer after which the command gives up
_MAX_UNANSWERED = 32


def answers_header(
    llm: LLM, sources: list[SourceSpec], max_tokens: int, seed: int, prompts: str = QUESTIONS
) -> AnswersHeader:
    """Return the header of a file of answers that ``llm`` gives to questions from ``sources``.

    ``max_tokens`` is the maximum number of tokens of an answer; the seed of each dialogue is
    derived from ``seed``. With the ``prompts`` :data:`BEGINNINGS`, ``llm`` continues documents.
    """
    fingerprint = Fingerprint.of(llm.path)
    return AnswersHeader(
        target=llm.path.resolve().name,
        architecture=fingerprint.architecture,
        weights=fingerprint.weights,
        tokenizer=llm.tokenizer.fingerprint,
        vocab_size=llm.config.vocab_size,
        sources=tuple(source.name for source in sources),
        max_tokens=max_tokens,
        seed=seed,
        prompts=prompts,
    )


def temperature_of(number: int) -> float:
    """Return the temperature of the answers in dialogue number ``number``."""
    return _TEMPERATURES[number % len(_TEMPERATURES)]


def continuation_params(
    llm: LLM, prompt: list[int], max_tokens: int, temperature: float, seed: int, number: int
) -> SamplingParams:
    """Return the sampling parameters with which ``llm`` continues ``prompt`` within its context.

    ``max_tokens`` is a maximum. The request's seed is derived from ``seed`` and ``number``, the
    number of the dialogue.
    """
    room = llm.config.context - len(prompt)
    request_seed = derive_seed(seed, number)
    return SamplingParams(
        max_tokens=min(max_tokens, room), temperature=temperature, seed=request_seed
    )


def write_answers(
    llm: LLM,
    ask: Callable[[int], list[str]],
    header: AnswersHeader,
    path: Path,
    *,
    tokens: int,
    batch: int,
    progress: Callable[[int], None],
    seconds_left: Callable[[], float] = lambda: inf,
    first: int = 0,
) -> int:
    """Append dialogues to a file, and return the number of answer tokens in it.

    Args:
        llm: the target, which answers the questions.
        ask: returns the questions for the number of a dialogue, or the beginning of a document as
            ``header.prompts`` says; an empty list skips the dialogue.
        header: model and settings of the answers. If the file exists, its header must be equal,
            and the file is continued.
        path: the file of answers.
        tokens: number of answer tokens after which writing ends.
        batch: number of dialogues in a forward pass; an interruption loses at most 4 times as many.
        progress: called with the number of answer tokens, after each group of dialogues.
        seconds_left: returns the remaining time; at 0, writing ends before the next group.
        first: number of the first dialogue of a new file.
    """
    if header.max_tokens >= llm.config.context:
        expected = f"expected less than the model's context of {llm.config.context}"
        msg = f"max_tokens: {expected}, found {header.max_tokens}"
        raise OptionError(msg)
    writer = AnswersWriter(path, header)
    done = sum(dialogue.num_answered for dialogue in writer.existing)
    last = max((dialogue.number for dialogue in writer.existing), default=first - 1)
    numbers = _askable(ask, last + 1)
    answer = partial(_answer, llm, header)
    if header.prompts == BEGINNINGS:
        encode = Encoder.of_target(llm.tokenizer, llm.config).encode_plain
        answer = partial(_continue, llm, header, encode)
    size = batch
    unanswered = 0
    while done < tokens and seconds_left() > 0:
        group = list(islice(numbers, size))
        size = _GROUP * batch
        dialogues = [each for each in answer(dict(group)) if each.num_answered >= _MIN_ANSWER]
        unanswered = 0 if dialogues else unanswered + len(group)
        if unanswered >= _MAX_UNANSWERED:
            msg = (
                f"{path}: expected answers to {unanswered} questions, found none of at least "
                f"{_MIN_ANSWER} tokens; lower max_tokens or give other texts"
            )
            raise OptionError(msg)
        writer.append(dialogues)
        done += sum(dialogue.num_answered for dialogue in dialogues)
        progress(done)
    return done


def _askable(ask: Callable[[int], list[str]], first: int) -> Iterator[tuple[int, list[str]]]:
    """Yield number and questions of each dialogue from ``first`` on, without those of no questions.

    Raises OptionError after ``_MAX_SKIPPED`` dialogues without questions in a row.
    """
    skipped = 0
    for number in count(first):
        turns = ask(number)
        skipped = 0 if turns else skipped + 1
        if turns:
            yield number, turns
        elif skipped == _MAX_SKIPPED:
            msg = (
                f"data: expected texts to ask about, found {skipped} questions in a row that are "
                "excluded"
            )
            raise OptionError(msg)


def _continue(
    llm: LLM,
    header: AnswersHeader,
    encode: Callable[[list[str]], list[list[int]]],
    beginnings: dict[int, list[str]],
) -> list[Dialogue]:
    """Return dialogues in which the target has continued the beginnings of documents.

    ``encode`` converts texts to token ids, and ``beginnings`` has one text for each number.
    """
    encoded = encode([text for (text,) in beginnings.values()])
    return list(_generate(llm, dict(zip(beginnings, encoded, strict=True)), header, 0).values())


def _answer(llm: LLM, header: AnswersHeader, questions: dict[int, list[str]]) -> list[Dialogue]:
    """Return dialogues in which the target has answered the questions.

    The first question of each dialogue is answered, then the second one of those that have two.
    """
    messages = {number: [_message("user", turns[0])] for number, turns in questions.items()}
    dialogues = _turn(llm, messages, header, 0)
    followed: dict[int, list[dict[str, str]]] = {}
    for number, turns in questions.items():
        if len(turns) > 1 and number in dialogues:
            dialogue = dialogues[number]
            start, end = dialogue.answers[0]
            # An answer that was cut off is not followed by a second question.
            if dialogue.ids[end - 1] in llm.tokenizer.eos_ids:
                text = llm.tokenizer.decode(dialogue.ids[start : end - 1])
                more = [_message("assistant", text), _message("user", turns[1])]
                followed[number] = [*messages[number], *more]
    for number, second in _turn(llm, followed, header, 1).items():
        first = dialogues[number]
        # If the template reproduces the tokens of the first answer, that answer is trained on, too.
        repeats = second.ids[: len(first.ids)] == first.ids
        answers = [*first.answers, *second.answers] if repeats else second.answers
        dialogues[number] = Dialogue(number, second.temperature, second.ids, answers)
    return list(dialogues.values())


def _turn(
    llm: LLM, messages: dict[int, list[dict[str, str]]], header: AnswersHeader, turn: int
) -> dict[int, Dialogue]:
    """Return the dialogues with the target's answer to the last message, by number.

    ``messages`` are the dialogues so far, and ``turn`` is the number of the answer, 0 or 1. A
    dialogue is left out if the template refuses it, or its prompt leaves no room for an answer.
    """
    prompts: dict[int, list[int]] = {}
    for number, said in messages.items():
        with suppress(PromptError):
            prompts[number] = llm.chat_ids(said)
    return _generate(llm, prompts, header, turn)


def _generate(
    llm: LLM, encoded: dict[int, list[int]], header: AnswersHeader, turn: int
) -> dict[int, Dialogue]:
    """Return the dialogues with the target's answer, by number.

    ``encoded`` are the token ids of the prompts, and ``turn`` is the number of the answer, 0 or 1.
    A dialogue is left out if its prompt does not leave room for an answer.
    """
    longest = llm.config.context - header.max_tokens
    prompts = {number: ids for number, ids in encoded.items() if len(ids) <= longest}
    params: list[SamplingParams] = []
    for number, ids in prompts.items():
        temperature = temperature_of(number)
        # number of the answer among all dialogues, each of which has at most two
        place = 2 * number + turn
        params.append(
            continuation_params(llm, ids, header.max_tokens, temperature, header.seed, place)
        )
    completions = llm.generate(list(prompts.values()), params) if prompts else []
    dialogues = {}
    for (number, prompt), done in zip(prompts.items(), completions, strict=True):
        ids = [*prompt, *done.token_ids]
        dialogues[number] = Dialogue(number, temperature_of(number), ids, [(len(prompt), len(ids))])
    return dialogues


def _message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}
