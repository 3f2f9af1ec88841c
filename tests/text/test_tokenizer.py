"""Tokenizers: ids and texts as in transformers, chat templates, and errors of tokenizer files."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import models, processors

from checkpoints import VOCAB, byte_tokenizer
from pronk.base.errors import PromptError, TokenizerError
from pronk.text.tokenizer import Tokenizer, have_equal_files

TEXTS = [
    "def add(a, b):\n    return a + b\n",
    "naïve café 🙂",
    "<|endoftext|>x",
    "",
    " two  spaces ",
]
USER = {"role": "user", "content": "Hi"}
ANSWER = {"role": "assistant", "content": "Hello"}

WriteTokenizer = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> WriteTokenizer:
    """Return ``write(backend, **config)``, which writes a folder with a tokenizer and its
    config.
    """

    def get(backend: tokenizers.Tokenizer | None = None, **config: Any) -> Path:
        (backend or byte_tokenizer()).save(str(tmp_path / "tokenizer.json"))
        values = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": "<|endoftext|>",
            **config,
        }
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(values))
        return tmp_path

    return get


def transformers_tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("with_bos", [False, True])
def test_ids_equal_transformers(text: str, with_bos: bool, write: WriteTokenizer) -> None:
    backend = byte_tokenizer()
    if with_bos:
        end = "<|endoftext|>"
        backend.post_processor = processors.TemplateProcessing(
            single=f"{end} $A", special_tokens=[(end, 0)]
        )
    folder = write(backend, bos_token="<|endoftext|>")
    ours = Tokenizer.load(folder, VOCAB)
    theirs = transformers_tokenizer(folder)
    assert ours.encode(text) == theirs.encode(text)
    assert ours.encode(text, add_special_tokens=False) == theirs.encode(
        text, add_special_tokens=False
    )
    assert (0 in ours.encode("plain")) == with_bos
    ids = ours.encode(text)
    assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
    assert ours.decode(ids, skip_special_tokens=False) == theirs.decode(ids)


def test_special_ids(write: WriteTokenizer) -> None:
    tokenizer = Tokenizer.load(
        write(bos_token={"content": "<|endoftext|>", "lstrip": False}, unk_token="absent")
    )
    assert (tokenizer.eos_ids, tokenizer.bos_id, tokenizer.special_ids) == ((0,), 0, {0})
    assert tokenizer.vocab_size == VOCAB
    assert [tokenizer.token_text(i) is None for i in (0, 1, VOCAB - 1, VOCAB, 10**6)] == [
        True,
        False,
        False,
        True,
        True,
    ]
    assert Tokenizer(byte_tokenizer()).eos_ids == ()
    assert Tokenizer(byte_tokenizer()).bos_id is None


def test_special_tokens_of_the_older_file(write: WriteTokenizer) -> None:
    folder = write(eos_token="<|endoftext|>")
    (folder / "tokenizer_config.json").unlink()
    (folder / "special_tokens_map.json").write_text('{"bos_token": "<|endoftext|>"}')
    tokenizer = Tokenizer.load(folder)
    assert (tokenizer.bos_id, tokenizer.eos_ids) == (0, ())


def test_truncation_and_padding_are_removed(write: WriteTokenizer) -> None:
    backend = byte_tokenizer()
    backend.enable_truncation(4)
    backend.enable_padding(length=50)
    tokenizer = Tokenizer.load(write(backend))
    assert (
        tokenizer.decode(tokenizer.encode("a long text without any end"))
        == "a long text without any end"
    )


def test_ids_beyond_the_model_are_refused(write: WriteTokenizer) -> None:
    folder = write()
    assert (
        Tokenizer.load(folder, VOCAB).vocab_size
        == Tokenizer.load(folder, VOCAB + 20).vocab_size
        == VOCAB
    )
    with pytest.raises(
        TokenizerError, match=rf"ids up to {VOCAB - 1}, but the model's vocabulary has {VOCAB - 1}"
    ):
        Tokenizer.load(folder, VOCAB - 1)
    folder = write(tokenizers.Tokenizer(models.BPE({"a": 0, "b": VOCAB}, [])))
    with pytest.raises(
        TokenizerError, match=rf"ids up to {VOCAB}, but the model's vocabulary has {VOCAB}, so"
    ):
        Tokenizer.load(folder, VOCAB)


@pytest.mark.parametrize(
    ("files", "found"),
    [
        ({}, "no tokenizer file"),
        ({"tokenizer.model": b"\x0a"}, "tokenizer.model"),
        ({"vocab.json": b"{}"}, "vocab.json"),
        ({"vocab.json": b"{}", "merges.txt": b""}, "vocab.json and merges.txt"),
    ],
)
def test_no_tokenizer(files: dict[str, bytes], found: str, tmp_path: Path) -> None:
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    with pytest.raises(
        TokenizerError,
        match=rf"expected tokenizer.json, found {found}; write one with transformers",
    ):
        Tokenizer.load(tmp_path, VOCAB)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer.json", b"{", r"tokenizer.json: expected a tokenizer, found an unreadable file"),
        ("tokenizer.json", b"\xff\xfe", r"tokenizer.json: expected text in UTF-8, found UTF-16"),
        ("tokenizer.json", b'{"model": 1}', r"tokenizer.json: expected a tokenizer, found"),
        ("tokenizer_config.json", b"{", r"tokenizer_config.json: expected JSON"),
        (
            "tokenizer_config.json",
            b"[]",
            r"tokenizer_config.json: expected a JSON object, found list",
        ),
        (
            "tokenizer_config.json",
            b'{"chat_template": [1]}',
            r"expected chat_template to be a string or a list",
        ),
        (
            "tokenizer_config.json",
            b'{"chat_template": 1}',
            r"expected chat_template to be a string or a list",
        ),
    ],
)
def test_damaged_files(name: str, content: bytes, message: str, write: WriteTokenizer) -> None:
    folder = write()
    (folder / name).write_bytes(content)
    with pytest.raises(TokenizerError, match=message) as caught:
        Tokenizer.load(folder, VOCAB)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("prompt", [False, True])
def test_chat_equals_transformers(prompt: bool, write: WriteTokenizer) -> None:
    template = (
        "{{ bos_token }}{%- for m in messages -%}\n  {{ m['role'] }}: {{ m.content }}\n{%- endfor "
        "%}"
        "{% if add_generation_prompt %}<b>{% endif %}{{ tools is none }}{{ eos_token }}"
    )
    folder = write(chat_template=template, bos_token="<|endoftext|>")
    messages = [USER, {"role": "assistant", "content": " 5 < 6 & 'é'\n"}, USER]
    expected = transformers_tokenizer(folder).apply_chat_template(
        messages, tokenize=False, add_generation_prompt=prompt
    )
    assert Tokenizer.load(folder).chat(messages, add_generation_prompt=prompt) == expected


def test_sources_of_the_template(write: WriteTokenizer) -> None:
    named = [
        {"name": "tool_use", "template": "{{ tools | length }} tools"},
        {"name": "default", "template": "chosen"},
    ]
    folder = write(chat_template=named)
    assert Tokenizer.load(folder).chat([USER]) == "chosen"
    assert (
        Tokenizer.load(folder).chat([USER], tools=[{"type": "function", "function": {"name": "f"}}])
        == "1 tools"
    )
    (folder / "chat_template.jinja").write_text("from the file")
    assert Tokenizer.load(folder).chat([USER]) == "from the file"


def test_additional_chat_templates(write: WriteTokenizer) -> None:
    """As in transformers, ``NAME.jinja`` is the template of this name; ``tool_use`` is for requests
    with tools.
    """
    tools: Any = [{"type": "function", "function": {"name": "f"}}]
    folder = write(chat_template="of the config")
    (folder / "additional_chat_templates").mkdir()
    for name in ("tool_use", "rag"):
        (folder / f"additional_chat_templates/{name}.jinja").write_text(name)
    loaded = Tokenizer.load(folder)
    assert [loaded.chat([USER]), loaded.chat([USER], tools=tools)] == ["of the config", "tool_use"]
    (folder / "chat_template.jinja").write_text("of the file")
    loaded = Tokenizer.load(folder)
    theirs = transformers_tokenizer(folder)
    for given in (None, tools):
        expected = theirs.apply_chat_template([USER], tools=given, tokenize=False)
        assert (
            loaded.chat([USER], tools=given) == expected == ("tool_use" if given else "of the file")
        )


@pytest.mark.parametrize(
    "templates", [{}, {"default": "{{ bos_token }} a"}, {"default": "a", "tool_use": "b"}]
)
def test_saved_tokenizers_are_equal(
    templates: dict[str, str], write: WriteTokenizer, tmp_path: Path
) -> None:
    named = [{"name": name, "template": text} for name, text in templates.items()]
    tokenizer = Tokenizer.load(
        write(bos_token="<|endoftext|>", **({"chat_template": named} if named else {}))
    )
    (tmp_path / "saved").mkdir()
    tokenizer.save(tmp_path / "saved")
    saved = Tokenizer.load(tmp_path / "saved")
    assert saved.digest == tokenizer.digest
    text = "Ein Satz <|endoftext|> über 5 Bäume."
    assert (
        saved.encode(text)
        == tokenizer.encode(text)
        == transformers_tokenizer(tmp_path / "saved").encode(text)
    )
    if "default" in templates:
        assert saved.chat([USER]) == tokenizer.chat([USER])


def test_no_template(tokenizer: Tokenizer) -> None:
    assert tokenizer.chat_template is None
    with pytest.raises(
        TokenizerError, match=r"no chat template: expected chat_template in tokenizer_config.json"
    ):
        tokenizer.chat([USER])


def templated(source: str) -> Tokenizer:
    return Tokenizer(byte_tokenizer(), chat_template=source)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (
            "{{ raise_exception('roles must alternate') }}",
            "refuses these messages: roles must alternate",
        ),
        ("{{ messages[9].content }}", "refuses these messages: "),
        ("{{ 1 / 0 }}", "refuses these messages: division by zero"),
        ("{{ messages.append(1) }}", "refuses these messages: "),
        (
            "{{ namespace(__class__=1) }}",
            "refuses these messages: a namespace cannot have an attribute '__class__'",
        ),
        (
            "{% set ns = namespace() %}{% set ns._x = 1 %}",
            "refuses these messages: a namespace cannot have",
        ),
        ("{{ range(10 ** 9) | list }}", "refuses these messages: "),
        ("{{ lipsum() }}", "refuses these messages: 'lipsum' is undefined"),
    ],
)
def test_errors_of_templates(source: str, message: str) -> None:
    with pytest.raises(PromptError, match=message) as caught:
        templated(source).chat([USER, ANSWER])
    assert "\n" not in str(caught.value)


def test_invalid_jinja_is_refused() -> None:
    with pytest.raises(
        TokenizerError, match=r"chat template: expected valid Jinja, found an error: "
    ):
        templated("{% for %}").chat([USER])


def test_messages_are_not_changed() -> None:
    messages = [dict(USER)]
    assert templated("{{ messages[0]['content'] }}").chat(messages) == "Hi"
    assert messages == [USER]


def test_equal_files_are_found(write: WriteTokenizer, tmp_path: Path) -> None:
    folder = write()
    other = tmp_path / "other"
    shutil.copytree(folder, other, ignore=shutil.ignore_patterns("other"))
    assert have_equal_files(folder, other)
    (other / "chat_template.jinja").write_text("not compared")
    assert have_equal_files(folder, other)
    (other / "special_tokens_map.json").write_text("{}")  # a file that one of them lacks
    assert not have_equal_files(folder, other)
    assert not have_equal_files(other, folder)
    (other / "special_tokens_map.json").unlink()
    text = (folder / "tokenizer.json").read_text()
    (other / "tokenizer.json").write_text(text.replace("<|endoftext|>", "<|endofTEXT|>"))
    assert not have_equal_files(folder, other)
    (other / "tokenizer.json").unlink()
    assert not have_equal_files(folder, other)
    assert not have_equal_files(other, folder)
    assert not have_equal_files(tmp_path / "model.gguf", tmp_path / "model.gguf")
