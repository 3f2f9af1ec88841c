"""Branch positions are where later prompts of a conversation part from a prompt."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, pre_tokenizers

from checkpoints import byte_tokenizer
from pronk.text.chat.branches import common_length, later_conversations
from pronk.text.tokenizer import Tokenizer
from text.chat.tool_templates import QWEN35, SMALL_QWEN35
from text.chat.tool_templates import TEMPLATES as TOOL_TEMPLATES

FILES = Path(__file__).with_name("templates").glob("*.jinja")
TEMPLATES = {path.stem: path.read_text(encoding="utf-8") for path in FILES} | TOOL_TEMPLATES
TEMPLATES |= {"qwen3.5": QWEN35, "small qwen3.5": SMALL_QWEN35}
SPECIAL = [
    "<|im_start|>", "<|im_end|>", "<|user|>", "<|assistant|>", "<|end|>", "<|start|>", "<|channel|>",
    "<|message|>", "[INST]", "[/INST]", "<s>", "</s>", "<|start_of_role|>", "<|end_of_role|>", "<|im_end|>x",
]  # fmt: skip
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}


def make_tokenizer(template: str) -> Tokenizer:
    """Return a tokenizer with merges, in which the markers of thoughts are no special tokens."""
    backend = byte_tokenizer(600)
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    backend.add_special_tokens([AddedToken(name, normalized=False) for name in SPECIAL])
    backend.add_tokens([AddedToken(name, normalized=False) for name in ("<think>", "</think>")])
    return Tokenizer(backend, special_tokens=TOKENS, chat_template=template)


TOKENIZERS = {name: make_tokenizer(template) for name, template in TEMPLATES.items()}


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def answer(content: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


SYSTEM = {"role": "system", "content": "Be brief."}
CALL = {"id": "abcdef123", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
CALLING = answer("", tool_calls=[CALL], reasoning_content="I should add.")
RESULT = {"role": "tool", "tool_call_id": "abcdef123", "content": "two"}
THOUGHTFUL = answer("Four.", reasoning_content="2 and 2.", thinking="2 and 2.")
CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "one message": [user("add the numbers")],
    "begins with white space": [SYSTEM, user("\n\n  And 3? ")],
    "empty": [SYSTEM, user("")],
    "parts": [user([{"type": "text", "text": "one"}, {"type": "text", "text": "two"}])],
    "turns": [SYSTEM, user("2 + 2?"), THOUGHTFUL, user("And 3 + 3?")],
    "names of tokens": [user("a<|im_end|>x <s>"), answer("<|im_start|>"), user("<|im_end|>b <|im_")],
    "call": [SYSTEM, user("add 1"), CALLING, RESULT],
    "two calls": [user("add 1"), CALLING, RESULT, CALLING, RESULT],
    "long": [SYSTEM, *[user("2 + 2?" * 40), answer("4 " * 60)] * 9, user("And? " * 300)],
}  # fmt: skip


@pytest.mark.parametrize("trusted", [True, False])
@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("template", TEMPLATES)
def test_positions_are_the_shared_tokens_of_whole_prompts(
    template: str, conversation: str, *, trusted: bool
) -> None:
    tokenizer = TOKENIZERS[template]
    messages = CONVERSATIONS[conversation]
    try:
        ids = tokenizer.chat_ids(messages, trusted=trusted)
    except Exception as error:  # noqa: BLE001 - the same error as without positions
        with pytest.raises(type(error)):
            tokenizer.chat_prompt(messages, trusted=trusted)
        return
    expected = set()
    for later in later_conversations(messages):
        try:
            other = tokenizer.chat_ids(
                later.messages, add_generation_prompt=later.begins_answer, trusted=trusted
            )
        except Exception:  # noqa: BLE001 - a refused conversation has no position
            continue
        expected.add(common_length(ids, other))
    prompt = tokenizer.chat_prompt(messages, trusted=trusted)
    assert prompt.token_ids == ids
    assert prompt.branch_positions == tuple(sorted(expected - {0}))


def shown(tokenizer: Tokenizer, ids: list[int]) -> str:
    return tokenizer.decode(ids, skip_special_tokens=False)


def parts_at(tokenizer: Tokenizer, messages: list[dict[str, Any]], **options: Any) -> list[str]:
    """Return the text of the prompt after each branch position."""
    prompt = tokenizer.chat_prompt(messages, options=options)
    return [shown(tokenizer, prompt.token_ids[at:]) for at in prompt.branch_positions]


def test_texts_after_the_positions() -> None:
    turns = [user("Hi?"), answer("Yes."), user("Well?")]
    plain = TOKENIZERS["hermes"]
    assert parts_at(plain, turns) == ["Well?<|im_end|>\n<|im_start|>assistant\n", ""]
    for name in ("qwen3.5", "small qwen3.5"):
        thinking = parts_at(TOKENIZERS[name], turns, enable_thinking=True)
        header = "<|im_end|>\n<|im_start|>assistant\n<think>\n"
        assert thinking == [f"Well?{header}", "<think>\n"]
        closed = parts_at(TOKENIZERS[name], turns, enable_thinking=False)
        assert closed == [f"Well?{header}\n</think>\n\n", "<think>\n\n</think>\n\n"]


def next_position(tokenizer: Tokenizer, messages: list[Any], *more: dict[str, Any]) -> int:
    """Return the number of tokens that the prompt shares with that of the next turn."""
    ids = tokenizer.chat_ids(messages)
    return common_length(ids, tokenizer.chat_ids([*messages, *more]))


@pytest.mark.parametrize("template", ["qwen2.5", "qwen3", "qwen3.5", "smollm3", "hermes"])
def test_the_next_question_parts_at_a_position(template: str) -> None:
    """Also after calls of tools, whose thoughts the template then deletes."""
    tokenizer = TOKENIZERS[template]
    question = [SYSTEM, user("What is 1 + 1?")]
    for messages in (question, [*question, CALLING, RESULT], [*question, THOUGHTFUL, user("So?")]):
        positions = tokenizer.chat_prompt(messages).branch_positions
        parts = next_position(tokenizer, messages, THOUGHTFUL, user("And 2 + 2?"))
        assert parts in positions or parts >= positions[-1]
    if template in ("qwen3", "qwen3.5"):
        called = [*question, CALLING, RESULT]
        parts = next_position(tokenizer, called, THOUGHTFUL, user("And 2 + 2?"))
        assert shown(tokenizer, tokenizer.chat_ids(called)[parts:]).startswith("<think>\nI should")
        assert parts in tokenizer.chat_prompt(called).branch_positions


def test_a_result_of_a_tool_parts_behind_the_last_position() -> None:
    tokenizer = TOKENIZERS["qwen3.5"]
    called = [SYSTEM, user("What is 1 + 1?"), CALLING, RESULT]
    prompt = tokenizer.chat_prompt(called)
    without_thoughts = answer("", tool_calls=[CALL])
    parts = next_position(tokenizer, called, without_thoughts, RESULT)
    last = prompt.branch_positions[-1]
    assert last <= parts < len(prompt.token_ids)
    assert shown(tokenizer, prompt.token_ids[last:]) == "<|im_start|>assistant\n<think>\n"


def test_an_edited_message_parts_at_the_first_position() -> None:
    for name in ("qwen2.5", "qwen3", "qwen3.5", "smollm3", "phi-4", "gpt-oss"):
        tokenizer = TOKENIZERS[name]
        first, *_ = tokenizer.chat_prompt([user("Hi?"), answer("Yes."), user("Well?")])[1]
        edited = tokenizer.chat_ids([user("Hi?"), answer("Yes."), user("So what?")])
        assert shown(tokenizer, edited[first:]).startswith("So what?"), name


REFUSING = {
    "answers": ("{% if m.role == 'assistant' %}{{ raise_exception('no') }}{% endif %}", 1),
    "another message": ("{% if m.content != 'Hi?' %}{{ raise_exception('no') }}{% endif %}", 0),
    "endless": (
        "{% if m.content != 'Hi?' %}{% for i in range(10**9) %}.{% endfor %}{% endif %}",
        0,
    ),
}


@pytest.mark.parametrize("refused", REFUSING)
def test_a_refused_conversation_has_no_position(refused: str) -> None:
    check, count = REFUSING[refused]
    body = "<|im_start|>{{ m.role }} {{ m.content }}<|im_end|>"
    tokenizer = make_tokenizer(f"{{% for m in messages %}}{check}{body}{{% endfor %}}")
    prompt = tokenizer.chat_prompt([user("Hi?")])
    assert prompt.token_ids == tokenizer.chat_ids([user("Hi?")])
    assert len(prompt.branch_positions) == count


def test_texts_without_special_tokens_are_compared_whole() -> None:
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}bot:"
    tokenizer = make_tokenizer(template)
    messages = [user("Hello there"), answer("yes"), user("Well?")]
    first, second = tokenizer.chat_prompt(messages).branch_positions
    ids = tokenizer.chat_ids(messages)
    assert shown(tokenizer, ids[:first]).rstrip() == "user: Hello there\nassistant: yes\nuser:"
    assert shown(tokenizer, ids[:second]) == "user: Hello there\nassistant: yes\nuser: Well?\n"


def test_conversations_without_a_question_have_no_positions() -> None:
    tokenizer = TOKENIZERS["hermes"]
    assert tokenizer.chat_prompt([SYSTEM]).branch_positions == ()
    assert later_conversations([SYSTEM, answer("Hello.")]) == []


def test_only_the_parts_with_the_difference_are_encoded(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = TOKENIZERS["qwen3.5"]
    messages = [SYSTEM, user("x" * 20_000), answer("y" * 20_000), user("Well?"), CALLING, RESULT]
    messages += [answer("z" * 20_000, tool_calls=[CALL]), RESULT]
    expected = tokenizer.chat_prompt(messages)
    encoded = list[int]()
    encode = Tokenizer.encode

    def count(self: Tokenizer, text: str, **options: Any) -> list[int]:
        encoded.append(len(text))
        return encode(self, text, **options)

    monkeypatch.setattr(Tokenizer, "encode", count)
    assert tokenizer.chat_prompt(messages) == expected
    whole, *parts = encoded
    assert whole > 60_000
    assert sum(parts) < 2_000, json.dumps(parts)


@pytest.mark.parametrize(
    ("first", "second", "count"),
    [
        ("", "", 0),
        ("", "a", 0),
        ("ab", "ab", 2),
        ("ab", "abc", 2),
        ("abd", "abc", 2),
        ("b", "a", 0),
    ],
)
def test_common_length(first: str, second: str, count: int) -> None:
    assert common_length(first, second) == count
    assert common_length([*first], [*second]) == count
