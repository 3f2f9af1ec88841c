"""A streamed reply equals the whole reply, however the tokens are divided into steps."""

import random
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import pytest

from pronk.engine.outputs import Completion, Piece
from pronk.llm import LLM
from pronk.sampling.params import SamplingParams
from pronk.server.protocol.chat import ChatMessage, ChatRequest
from pronk.server.protocol.completions import CompletionRequest
from pronk.server.protocol.request import Reply, TextRequest
from pronk.server.protocol.responses import ResponsesRequest
from pronk.text.chat.branches import ChatPrompt

FRAME = {"model": "tiny"}
PROMPT = "def mean(values):\n    return sum(values) / len(values)\n\ndef mean(values):\n"
# The texts have characters of several tokens, stop strings across tokens, and possible starts of
# stop strings.
OPTIONS: list[dict[str, Any]] = [
    {"temperature": 1.3, "seed": 4, "max_tokens": 40, "n": 3, "stop": ["retu", "\n\n"]},
    {"temperature": 0.0, "seed": 0, "max_tokens": 33, "n": 1, "stop": ["values)\n"]},
    {"temperature": 1.8, "seed": 9, "max_tokens": 48, "n": 2, "stop": [], "ignore_eos": True},
]


def texts_of(kind: str, chunks: Sequence[dict[str, Any]]) -> dict[int, str]:
    found = defaultdict[int, str](str)
    for chunk in chunks:
        for choice in chunk.get("choices", ()):
            found[choice["index"]] += (
                choice["text"] if kind == "completions" else choice["delta"].get("content", "")
            )
        if chunk.get("type") == "response.output_text.delta":
            found[0] += chunk["delta"]
    return found


def logprobs_of(kind: str, chunks: Sequence[dict[str, Any]]) -> dict[int, list[Any]]:
    found = defaultdict[int, list[Any]](list)
    for chunk in chunks:
        for choice in chunk.get("choices", ()):
            own = choice["logprobs"]
            if own is not None:
                found[choice["index"]] += (
                    own["content"] if kind == "chat" else [*zip(*own.values(), strict=True)]
                )
        if chunk.get("type") == "response.output_text.delta":
            found[0] += chunk["logprobs"]
    return found


def ends_of(chunks: Sequence[dict[str, Any]]) -> dict[int, Any]:
    choices = [choice for chunk in chunks for choice in chunk.get("choices", ())]
    return {
        choice["index"]: choice["finish_reason"]
        for choice in choices
        if choice["finish_reason"] is not None
    }


def ask_of(kind: str, options: dict[str, Any]) -> TextRequest:
    more: dict[str, Any] = {**options, "stream": True}
    tokens = more.pop("max_tokens")
    if kind == "completions":
        return CompletionRequest(prompt=PROMPT, logprobs=2, max_tokens=tokens, leaps=True, **more)
    if kind == "chat":
        message = ChatMessage(role="user", content=PROMPT)
        return ChatRequest(
            messages=[message], logprobs=True, top_logprobs=2, max_tokens=tokens, leaps=True, **more
        )
    return ResponsesRequest(
        input=PROMPT, top_logprobs=2, max_output_tokens=tokens, **{**more, "n": 1}
    )


def answer_of(model: LLM, kind: str, ask: Any) -> tuple[Reply, SamplingParams]:
    ids = model.request_factory.encode_prompt(PROMPT)
    if kind == "completions":
        prepared = ask.prepare([ids], model.tokenizer, FRAME)
    else:
        answers = model.request_factory.answer_format
        prepared = ask.prepare(ChatPrompt(ids), ask.requested_max_tokens, answers, FRAME)
    return prepared.reply, prepared.inputs.params


def cut(pieces: list[Piece], random_: random.Random) -> list[list[Piece]]:
    """Divide pieces into steps of random size; samples interleave at random, each in its own
    order.
    """
    queues = [
        [p for p in pieces if p.index == index] for index in sorted({p.index for p in pieces})
    ]
    mixed = list[Piece]()
    while any(queues):
        mixed.append(random_.choice([queue for queue in queues if queue]).pop(0))
    steps = []
    while mixed:
        count = random_.randint(1, 9)
        steps.append(mixed[:count])
        mixed = mixed[count:]
    return steps


@pytest.mark.few(3)
@pytest.mark.parametrize("kind", ["completions", "chat", "responses"])
@pytest.mark.parametrize("options", OPTIONS, ids=range(3))
def test_stream_equals_the_whole_reply_for_any_division(
    model: LLM, kind: str, options: dict[str, Any]
) -> None:
    ask = ask_of(kind, options)
    _, params = answer_of(model, kind, ask)
    pieces = [*model.stream(PROMPT, params, drafter="recycling")]
    done: list[Completion] = [
        piece.completion for piece in sorted(pieces, key=lambda p: p.index) if piece.completion
    ]
    recorded = answer_of(model, kind, ask)[0]
    recorded.record(pieces)
    whole = recorded.whole(done)
    random_ = random.Random(7)
    for _ in range(12):
        answer, _ = answer_of(model, kind, ask)
        chunks = answer.start()
        for step in cut(pieces, random_):
            chunks += answer.step(step)
        chunks += answer.end(done)
        texts = texts_of(kind, chunks)
        logprobs = logprobs_of(kind, chunks)
        if kind == "responses":
            part = whole["output"][0]["content"][0]
            assert (texts[0], logprobs[0]) == (part["text"], part["logprobs"])
            assert chunks[-1]["response"]["usage"] == whole["usage"]
            assert [chunk["sequence_number"] for chunk in chunks] == [*range(len(chunks))]
            continue
        for choice in whole["choices"]:
            want = choice["text"] if kind == "completions" else choice["message"]["content"]
            own = choice["logprobs"]
            entries = own["content"] if kind == "chat" else [*zip(*own.values(), strict=True)]
            assert texts[choice["index"]] == want
            assert logprobs[choice["index"]] == entries
            assert ends_of(chunks)[choice["index"]] == choice["finish_reason"]
