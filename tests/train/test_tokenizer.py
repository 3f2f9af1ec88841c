import random
from pathlib import Path

import pytest

from pronk.base.errors import OptionError, TokenizerError
from pronk.train.corpus.encoder import SPECIAL_TOKENS, dialogue_ids, parse_dialogue, special_ids
from pronk.train.data import load_tokenizer, train_tokenizer


def test_every_byte_survives(prepared: Path) -> None:
    tokenizer = load_tokenizer(prepared)
    draw = random.Random(0)
    texts = [
        "".join(
            chr(draw.choice((draw.randrange(32, 127), draw.randrange(0x80, 0xD000))))
            for _ in range(50)
        )
    ]
    texts += ["\t\n\r\0  \n\n", "日本語 🦌 é", " def f():\n        return"]
    for text in texts:
        assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False).ids) == text


def test_special_tokens_come_first(prepared: Path) -> None:
    assert special_ids(load_tokenizer(prepared)) == [0, 1, 2, 3]
    assert load_tokenizer(prepared).get_vocab_size() == 320


def test_transformers_reads_the_same_ids(prepared: Path) -> None:
    from transformers import AutoTokenizer

    ours = load_tokenizer(prepared)
    theirs = AutoTokenizer.from_pretrained(prepared)
    text = "The cat sees  the river.\n    return x"
    assert theirs(text).input_ids == ours.encode(text).ids
    assert theirs.eos_token_id == 0
    assert theirs.convert_tokens_to_ids(list(SPECIAL_TOKENS)) == [0, 1, 2, 3]
    assert theirs.decode(theirs(text).input_ids) == text


def test_chat_template_is_what_was_trained(prepared: Path) -> None:
    from transformers import AutoTokenizer

    ours = load_tokenizer(prepared)
    theirs = AutoTokenizer.from_pretrained(prepared)
    said = ("What is it?", "A tree.\n\nA *big* one.", "And now?", "No.")
    turns = list(zip(("user", "assistant") * 2, said, strict=True))
    messages = [{"role": role, "content": content} for role, content in turns]
    assert theirs.apply_chat_template(messages, return_dict=False) == dialogue_ids(ours, turns)
    prompt = theirs.apply_chat_template(messages[:3], add_generation_prompt=True, tokenize=False)
    assert prompt.endswith("And now?<|end|><|assistant|>")


@pytest.mark.parametrize(
    ("text", "turns"),
    [
        ("User: Hi\nthere\n\nAssistant: Hello", [("user", "Hi\nthere"), ("assistant", "Hello")]),
        ("Customer: Tea\nBarista: Yes", [("user", "Tea"), ("assistant", "Yes")]),
        ("User: Hi", None),
        ("User: Hi\n\nUser: again\n\nAssistant: Hello", None),
        ("User: \n\nAssistant: Hello", None),
        ("A story. User: Hi\n\nAssistant: Hello", None),
    ],
)
def test_dialogues_are_recognized(text: str, turns: list[tuple[str, str]] | None) -> None:
    assert parse_dialogue(text) == turns


def test_half_of_the_question_and_answer_pairs_are_dialogues() -> None:
    found = [parse_dialogue(f"Question: What is {i} + 1?\nAnswer: {i + 1}") for i in range(200)]
    assert 60 < sum(turns is not None for turns in found) < 140


def test_vocabulary_size_is_checked() -> None:
    with pytest.raises(OptionError, match=r"expected an integer in 260..65536, found 100"):
        train_tokenizer(["text"], 100)
    with pytest.raises(OptionError, match=r"yields only \d+ tokens, expected 4096"):
        train_tokenizer(["a little text"], 4096)


def test_damaged_tokenizer_is_named(tmp_path: Path) -> None:
    for content in ("{", '{"model": 1}'):
        (tmp_path / "tokenizer.json").write_text(content)
        with pytest.raises(TokenizerError, match=r"tokenizer\.json: expected a tokenizer, found"):
            load_tokenizer(tmp_path)
    with pytest.raises(TokenizerError, match="expected a tokenizer"):
        load_tokenizer(tmp_path / "nowhere")
