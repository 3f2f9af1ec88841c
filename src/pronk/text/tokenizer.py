"""The model's tokenizer and chat template: text to token ids and back."""

from __future__ import annotations

import filecmp
import hashlib
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, Self

import tokenizers
from tokenizers import decoders, models

from pronk.base.arrays import trim_heap
from pronk.base.errors import PromptError, PronkError, TokenizerError, describe_error, refuse
from pronk.base.files.atomic import write_json, write_text
from pronk.base.files.text import read_text
from pronk.checkpoint.config import ModelConfig
from pronk.checkpoint.end_tokens import find_end_tokens
from pronk.checkpoint.gguf.checkpoint import GgufCheckpoint, is_gguf
from pronk.checkpoint.tensors import read_json
from pronk.text.chat.branches import ChatPrompt, common_length, later_conversations
from pronk.text.chat.messages import (
    Messages,
    TemplateOptions,
    Tools,
    check_messages,
    disguise,
    plain_ids,
    reveal,
)
from pronk.text.chat.template import ChatTemplate
from pronk.text.gguf_tokenizer import read_templates, read_tokenizer
from pronk.text.guarded import (
    GuardedTokenizer,
    encoding_error,
    load_backend,
    rust_panics_as_errors,
    shared_time,
)
from pronk.text.score_tokenizer import ScoreTokenizer

AnyTokenizer = tokenizers.Tokenizer | GuardedTokenizer | ScoreTokenizer

# Files of a tokenizer in a model folder, except chat templates; the first one is required.
_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")
_TEMPLATE_FILE = "chat_template.jinja"
_TEMPLATE_FOLDER = "additional_chat_templates"

# Number of characters or tokens above which a text is converted as a batch of one. The tokenizers
# package holds Python's lock while it converts, at a million characters or tokens per second, and
# other threads wait; its functions for batches do not hold the lock.
_LONG = 2**12


class _HiddenNames(NamedTuple):
    """A conversation in which private characters hide names of special tokens."""

    messages: Messages
    tools: Tools | None
    placeholders: Mapping[str, str]  # the name that each private character stands for


class _Templates(NamedTuple):
    """Chat templates of a model.

    Attributes:
        special_tokens: texts of special tokens by the names that templates use.
        sources: Jinja sources by name, of which ``default`` and ``tool_use`` are used.
        key: place of the template ``default`` in the model's files, for error messages.
    """

    special_tokens: Mapping[str, str]
    sources: Mapping[str, str]
    key: str


class Tokenizer:
    """A tokenizer with its chat template.

    Args:
        backend: tokenizer of the tokenizers package, in this process or in a child process, or one
            of the same methods.
        special_tokens: texts of special tokens by the names that templates use (``bos_token``, …).
        chat_template: Jinja source of the chat template. Without a chat template (``None``),
            :meth:`chat` raises a TokenizerError.
        tool_template: Jinja source that replaces ``chat_template`` in conversations with tools.
        template_key: place of the chat template in the model's files, for error messages.
    """

    def __init__(
        self,
        backend: AnyTokenizer,
        *,
        special_tokens: Mapping[str, str] | None = None,
        chat_template: str | None = None,
        tool_template: str | None = None,
        template_key: str = "chat_template in tokenizer_config.json",
    ) -> None:
        # Drop the settings for truncation and padding in the file, which are meant for training.
        backend.no_truncation()
        backend.no_padding()
        self.backend = backend
        self.chat_template = chat_template
        self._special_tokens = dict(special_tokens or {})
        self._tool_template = tool_template
        self._template_key = template_key
        self._templates: dict[str, ChatTemplate] = {}  # compiled templates by their sources
        self._token_texts: dict[int, str | None] = {}  # results of token_text(), by token id

    @classmethod
    def load(
        cls, folder: Path, vocab_size: int | None = None, opened: GgufCheckpoint | None = None
    ) -> Tokenizer:
        """Load the tokenizer of a model folder or a GGUF file.

        Args:
            folder: folder with ``tokenizer.json``, or a GGUF file.
            vocab_size: number of tokens of the model; no token id may reach this number.
            opened: the GGUF file, if it is open already.

        Raises:
            TokenizerError: a file is missing or damaged, or a token id is too large.
        """
        backend: AnyTokenizer
        if is_gguf(folder):
            checkpoint = opened or GgufCheckpoint(folder)
            backend, largest_id = read_tokenizer(checkpoint)
            templates = _read_templates(folder, checkpoint)
            # reading a vocabulary of 262,144 tokens leaves 15 MB of freed memory
            checkpoint.drop_vocabulary()
            trim_heap()
        else:
            backend = _read_backend(folder / "tokenizer.json")
            templates = _read_templates(folder, None)
            largest_id = max(backend.get_vocab(with_added_tokens=True).values(), default=-1)
        if vocab_size is not None and largest_id >= vocab_size:
            msg = (
                f"{folder}: the tokenizer has ids up to {largest_id}, but the model's vocabulary "
                f"has {vocab_size}, so ids up to {vocab_size - 1} were expected; "
                "use the tokenizer that belongs to this model"
            )
            raise TokenizerError(msg)
        return cls._of(backend, templates)

    @classmethod
    def load_templates(cls, folder: Path, opened: GgufCheckpoint | None = None) -> Tokenizer:
        """Load the chat templates of a model folder or a GGUF file, without its tokenizer.

        The result has no tokens: it renders conversations, but cannot encode them.

        Args:
            folder: model folder, or a GGUF file.
            opened: the GGUF file, if it is open already.

        Raises:
            TokenizerError: a file is damaged.
        """
        return cls._of(tokenizers.Tokenizer(models.BPE()), _read_templates(folder, opened))

    @classmethod
    def _of(cls, backend: AnyTokenizer, templates: _Templates) -> Self:
        return cls(
            backend,
            special_tokens=templates.special_tokens,
            chat_template=templates.sources.get("default"),
            tool_template=templates.sources.get("tool_use"),
            template_key=templates.key,
        )

    def stop(self) -> None:
        """End the child processes of the tokenizer at once, from any thread.

        Conversions in progress fail with a ClosedError. Later conversions start new processes. A
        tokenizer that runs in this process has no child processes and goes on.
        """
        if isinstance(self.backend, GuardedTokenizer):
            self.backend.stop()

    def save(self, folder: Path) -> None:
        """Write ``tokenizer.json`` and ``tokenizer_config.json`` to a folder.

        :meth:`load` and transformers read these files.
        """
        write_text(folder / "tokenizer.json", self.backend.to_str(pretty=True))
        config: dict[str, Any] = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            **self._special_tokens,
        }
        templates = {"default": self.chat_template, "tool_use": self._tool_template}
        given = [
            {"name": name, "template": text} for name, text in templates.items() if text is not None
        ]
        if len(given) == 1 and self.chat_template:
            config["chat_template"] = self.chat_template
        elif given:
            config["chat_template"] = given
        write_json(folder / "tokenizer_config.json", config, indent=2)

    @property
    def special_tokens(self) -> Mapping[str, str]:
        """Texts of special tokens by the names that templates use: ``{"eos_token": "<|end|>"}``."""
        return MappingProxyType(self._special_tokens)

    @property
    def vocab_size(self) -> int:
        """Number of tokens, special ones included."""
        return self.backend.get_vocab_size(with_added_tokens=True)

    @cached_property
    def fingerprint(self) -> str:
        """Hash of the tokens and their ids, 32 hexadecimal digits.

        Files of token ids store the fingerprint of their tokenizer.
        """
        tokens = sorted(
            self.backend.get_vocab(with_added_tokens=True).items(),
            key=lambda item: (item[1], item[0]),
        )
        return hashlib.sha256(json.dumps(tokens).encode("ascii")).hexdigest()[:32]

    @cached_property
    def digest(self) -> str:
        """Hash of tokenizer, special tokens and chat templates, 16 hexadecimal digits.

        By the digest, replicas of a model check that they convert texts alike.
        """
        templates = [self.chat_template, self._tool_template]
        rest = json.dumps([self._special_tokens, templates], sort_keys=True)
        return hashlib.sha256(f"{self.backend.to_str()}{rest}".encode()).hexdigest()[:16]

    @cached_property
    def vocabulary_json(self) -> str:
        """Text of ``tokenizer.json`` for packages that need the tokens only, such as llguidance.

        The text of a tokenizer in a child process lacks its normalizer, pre-tokenizer and
        post-processor, which may be slow or fail.
        """
        text = self.backend.to_str()
        if not isinstance(self.backend, GuardedTokenizer):
            return text
        removed = dict.fromkeys(("normalizer", "pre_tokenizer", "post_processor"))
        return json.dumps(json.loads(text) | removed)

    @cached_property
    def eos_ids(self) -> tuple[int, ...]:
        """Ids of the tokenizer's end-of-text token: one id, or none.

        The model's config may list further end tokens.
        """
        token = self._id_of("eos_token")
        return () if token is None else (token,)

    def add_end_tokens(self, config: ModelConfig) -> ModelConfig:
        """Return a model's config with the ids of all end tokens of its vocabulary.

        Added tokens with well-known names, such as ``<|im_end|>``, are end tokens as well.
        """
        added = {
            token_id: token.content
            for token_id, token in self.backend.get_added_tokens_decoder().items()
        }
        return replace(config, eos_ids=find_end_tokens(added, config.eos_ids))

    @cached_property
    def bos_id(self) -> int | None:
        """Id of the tokenizer's beginning-of-text token; ``None`` if it has none."""
        return self._id_of("bos_token")

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Ids of special tokens, which have no text."""
        added = self.backend.get_added_tokens_decoder()
        return frozenset(token_id for token_id, token in added.items() if token.special)

    @cached_property
    def added_ids(self) -> frozenset[int]:
        """Ids of the tokens that were added to the trained vocabulary, such as ``<|im_end|>``."""
        return frozenset(self.backend.get_added_tokens_decoder())

    @cached_property
    def joins_texts(self) -> bool:
        """Whether tokens of whole characters have the same text alone and among other tokens.

        If so, the text of a sequence of such tokens is the concatenation of the tokens' texts.
        Byte-level tokenizers have this property; SentencePiece drops the space at the beginning of
        a text.
        """
        return isinstance(self.backend.decoder, decoders.ByteLevel)

    def token_text(self, token_id: int) -> str | None:
        """Return the text of one token alone.

        Special tokens and the unassigned ids of a padded vocabulary have no text (``None``).
        """
        if token_id not in self._token_texts:
            is_silent = token_id in self.special_ids or self.backend.id_to_token(token_id) is None
            self._token_texts[token_id] = None if is_silent else self.decode([token_id])
        return self._token_texts[token_id]

    def token_name(self, token_id: int) -> str:
        """Return the name of one token, such as ``<|im_end|>``; empty for an unassigned id."""
        return self.backend.id_to_token(token_id) or ""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of ``text``.

        Args:
            text: any text; names of special tokens in it become these tokens.
            add_special_tokens: whether the tokens that the tokenizer puts around a text, such as
                ``bos_token``, are added.

        Raises:
            PromptError: the tokenizer cannot encode the text.
        """
        try:
            with rust_panics_as_errors():
                if len(text) > _LONG:
                    (encoding,) = self.backend.encode_batch_fast(
                        [text], add_special_tokens=add_special_tokens
                    )
                else:
                    encoding = self.backend.encode(text, add_special_tokens=add_special_tokens)
                return encoding.ids
        except PronkError:
            raise
        except Exception as error:
            # The tokenizers package raises plain Exceptions, and a TypeError for lone surrogates.
            raise encoding_error(text, error) from error

    def encode_batch(
        self, texts: Sequence[str], *, add_special_tokens: bool = True
    ) -> list[list[int]]:
        """Return the token ids of each text; several threads encode the texts.

        Arguments and errors are those of :meth:`encode`.
        """
        try:
            with rust_panics_as_errors():
                encodings = self.backend.encode_batch_fast(
                    [*texts], add_special_tokens=add_special_tokens
                )
        except PronkError:
            raise
        except Exception:  # noqa: BLE001 - encode() raises the error of the text that fails
            return [self.encode(text, add_special_tokens=add_special_tokens) for text in texts]
        return [encoding.ids for encoding in encodings]

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of token ids; bytes that are not UTF-8 become U+FFFD."""
        tokens = list(ids)
        if len(tokens) > _LONG:
            (text,) = self.backend.decode_batch([tokens], skip_special_tokens=skip_special_tokens)
            return text
        return self.backend.decode(tokens, skip_special_tokens=skip_special_tokens)

    def chat(
        self,
        messages: Messages,
        *,
        add_generation_prompt: bool = True,
        tools: Tools | None = None,
        options: TemplateOptions | None = None,
    ) -> str:
        """Render a conversation as text, to be encoded with ``add_special_tokens=False``.

        Args:
            messages: conversation in OpenAI's format; see :mod:`pronk.text.chat.messages`.
            add_generation_prompt: append the beginning of the assistant's turn.
            tools: tools that the model may call, in OpenAI's format.
            options: further variables of the template, such as ``{"enable_thinking": False}``.

        Raises:
            TokenizerError: the chat template is missing or damaged.
            PromptError: the messages are malformed, rejected by the template, or exceed a limit.
        """
        template = self._template(with_tools=tools is not None)
        return template.render(
            messages, add_generation_prompt=add_generation_prompt, tools=tools, options=options
        )

    @property
    def template_reads_tools(self) -> bool:
        """Whether the chat template describes tools itself.

        Otherwise, :meth:`chat` describes tools in the system message
        (:mod:`pronk.text.chat.generic_tools`).

        Raises:
            TokenizerError: the chat template is missing or damaged.
        """
        return self._template(with_tools=True).reads_tools

    def _template(self, *, with_tools: bool) -> ChatTemplate:
        """Return the compiled chat template, or that for conversations with tools."""
        source = self.chat_template
        if with_tools and self._tool_template is not None:
            source = self._tool_template
        if source is None:
            refuse(
                "the model has no chat template",
                f"expected {self._template_key}, found none",
                TokenizerError,
            )
        if source not in self._templates:
            self._templates[source] = ChatTemplate(source, self._special_tokens)
        return self._templates[source]

    def chat_ids(
        self,
        messages: Messages,
        *,
        add_generation_prompt: bool = True,
        trusted: bool = True,
        tools: Tools | None = None,
        options: TemplateOptions | None = None,
    ) -> list[int]:
        """Return the token ids of a conversation.

        Other arguments and errors are those of :meth:`chat`; an empty result raises a PromptError,
        too. If the messages are ``trusted``, names of special tokens (such as ``<|im_end|>``) in
        messages and tools become these tokens, as in transformers. Names in untrusted messages are
        encoded as ordinary text (:func:`pronk.text.chat.messages.disguise`).
        """
        hidden = self._hide_names(messages, tools, trusted=trusted)
        text = self.chat(
            hidden.messages,
            add_generation_prompt=add_generation_prompt,
            tools=hidden.tools,
            options=options,
        )
        return self._encode_chat(text, hidden.placeholders)

    def chat_prompt(
        self,
        messages: Messages,
        *,
        trusted: bool = True,
        tools: Tools | None = None,
        options: TemplateOptions | None = None,
    ) -> ChatPrompt:
        """Return the token ids of a conversation, with positions at which later prompts may part.

        The template renders two or three later conversations, too
        (:mod:`pronk.text.chat.branches`). If it refuses one, its position is missing. Arguments and
        errors are those of :meth:`chat_ids`.
        """
        hidden = self._hide_names(check_messages(messages), tools, trusted=trusted)
        text = self.chat(hidden.messages, tools=hidden.tools, options=options)
        ids = self._encode_chat(text, hidden.placeholders)
        positions = set[int]()
        for later in later_conversations(hidden.messages):
            try:
                other = self.chat(
                    later.messages,
                    add_generation_prompt=later.begins_answer,
                    tools=hidden.tools,
                    options=options,
                )
                positions.add(self._num_shared(ids, text, other, hidden.placeholders))
            except PromptError:
                continue
        return ChatPrompt(ids, tuple(sorted(positions - {0})))

    def _num_shared(
        self, ids: list[int], text: str, other: str, placeholders: Mapping[str, str]
    ) -> int:
        """Return the number of first token ids that a rendered text shares with another one.

        Only the parts of both texts with the first difference are encoded: those between the
        special tokens before and after it. A tokenizer encodes such a part as it does in the whole
        text. If the part is not found in ``ids``, the whole other text is encoded.

        Args:
            ids: token ids of ``text``.
            text: rendered text of a conversation.
            other: rendered text of a later conversation.
            placeholders: private characters of both texts (:meth:`_hide_names`).
        """
        shared = common_length(text, other)
        places = [place for place, token in enumerate(ids) if token in self.special_ids]
        # The vocabulary may have thousands of special tokens; a conversation has a few of them.
        names = {self.token_name(ids[place]) for place in places}
        start = max((text.rfind(name, 0, shared) for name in names), default=-1)
        if start >= 0:
            before = sum(text.count(name, 0, start) for name in names)
            part = self._encode_revealed(_up_to(names, text, start, shared), placeholders)
            first = places[before] if before < len(places) else len(ids)
            if part and ids[first : first + len(part)] == part:
                other_part = _up_to(names, other, start, shared)
                other_ids = self._encode_revealed(other_part, placeholders)
                return first + common_length(part, other_ids)
        return common_length(ids, self._encode_revealed(other, placeholders))

    def _hide_names(
        self, messages: Messages, tools: Tools | None, *, trusted: bool
    ) -> _HiddenNames:
        """Return a conversation whose untrusted messages and tools have no special tokens."""
        if trusted:
            return _HiddenNames(messages, tools, {})
        checked = check_messages(messages)
        try:
            disguised, placeholders = disguise([*checked, *(tools or ())], self._special_names)
        except RecursionError as error:
            msg = (
                "messages, tools: expected values of a few hundred levels at most, found more; "
                "make them flatter"
            )
            raise PromptError(msg) from error
        disguised_tools = None if tools is None else disguised[len(checked) :]
        return _HiddenNames(disguised[: len(checked)], disguised_tools, placeholders)

    def _encode_chat(self, text: str, placeholders: Mapping[str, str]) -> list[int]:
        """Return the token ids of a rendered conversation; raise a PromptError if it is empty."""
        ids = self._encode_revealed(text, placeholders)
        if not ids:
            msg = (
                "the model's chat template: expected a text made of these messages, "
                "found an empty text; use another template, or pass a prompt instead of messages"
            )
            raise PromptError(msg)
        return ids

    def encode_plain(self, text: str) -> list[int]:
        """Return the token ids of an untrusted text.

        Names of special tokens in the text become ordinary tokens.
        """
        return self.encode_form("{}", text)

    def encode_form(self, form: str, *texts: str) -> list[int]:
        """Return the token ids of untrusted texts in a trusted form.

        Names of special tokens in ``form`` become these tokens; names in the texts become ordinary
        tokens.

        Args:
            form: text with ``{}`` for each of ``texts``, as in ``str.format``.
            *texts: untrusted texts.
        """
        hidden, placeholders = disguise([{"text": text} for text in texts], self._special_names)
        filled = form.format(*(each["text"] for each in hidden))
        return self._encode_revealed(filled, placeholders)

    def _encode_revealed(self, text: str, placeholders: Mapping[str, str]) -> list[int]:
        """Return the token ids of a prompt with private characters for names of special tokens.

        :func:`disguise` put these ``placeholders`` into untrusted messages. Each hidden name
        becomes ordinary tokens, so that it has no effect as a special token.
        """
        encode = partial(self.encode, add_special_tokens=False)
        ids = list[int]()
        with shared_time():
            for part, hidden in reveal(text, placeholders):
                ids += plain_ids(part, encode, self.special_ids) if hidden else encode(part)
        return ids

    @cached_property
    def _special_names(self) -> tuple[str, ...]:
        tokens = self.backend.get_added_tokens_decoder().values()
        return tuple(token.content for token in tokens if token.special and token.content)

    def _id_of(self, name: str) -> int | None:
        token = self._special_tokens.get(name)
        return None if token is None else self.backend.token_to_id(token)


def _up_to(names: Collection[str], text: str, start: int, stop: int) -> str:
    """Return a text from ``start`` up to the first of ``names`` at ``stop`` or later."""
    places = [text.find(name, stop) for name in names]
    return text[start : min((place for place in places if place >= 0), default=len(text))]


def have_equal_files(folder: Path, other: Path) -> bool:
    """Return whether the tokenizers of two model folders have the same files, to the byte.

    Chat templates are not compared. False for GGUF files.
    """
    if not (folder / _FILES[0]).is_file():
        return False
    for name in _FILES:
        paths = folder / name, other / name
        if not any(path.is_file() for path in paths):
            continue
        if not (all(path.is_file() for path in paths) and filecmp.cmp(*paths, shallow=False)):
            return False
    return True


def _read_optional(path: Path) -> dict[str, Any]:
    return read_json(path, TokenizerError) if path.is_file() else {}


def _read_backend(path: Path) -> tokenizers.Tokenizer | GuardedTokenizer:
    if not path.is_file():
        other_files = ("tokenizer.model", "vocab.json", "merges.txt")
        others = [name for name in other_files if path.with_name(name).is_file()]
        found = " and ".join(others) or "no tokenizer file"
        msg = (
            f"{path.parent}: expected tokenizer.json, found {found}; "
            "write one with transformers: AutoTokenizer.from_pretrained(...).save_pretrained(...)"
        )
        raise TokenizerError(msg)
    text = read_text(path, error=TokenizerError)
    try:
        return load_backend(text)
    except TokenizerError as error:
        msg = f"{path}: {error}; restore it from its source"
        raise TokenizerError(msg) from error
    except Exception as error:  # the tokenizers package raises plain Exceptions
        reason = describe_error(error)
        msg = (
            f"{path}: expected a tokenizer, found an unreadable file ({reason}); "
            "restore it from its source"
        )
        raise TokenizerError(msg) from error


def _read_templates(folder: Path, opened: GgufCheckpoint | None) -> _Templates:
    """Read the chat templates of a model folder or GGUF file, which may be open already."""
    if is_gguf(folder):
        special, sources = read_templates(opened or GgufCheckpoint(folder))
        key = "tokenizer.chat_template in the metadata of the GGUF file"
        return _Templates(special, sources, key)
    config = _read_optional(folder / "tokenizer_config.json")
    special = _special_tokens(_read_optional(folder / "special_tokens_map.json") | config)
    sources = _find_templates(folder, config)
    return _Templates(special, sources, "chat_template in tokenizer_config.json")


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the special tokens in ``tokenizer_config.json``, by name such as ``bos_token``."""
    tokens = {}
    for name, value in config.items():
        content = value.get("content") if isinstance(value, Mapping) else value
        if name.endswith("_token") and isinstance(content, str):
            tokens[name] = content
    return tokens


def _find_templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Return the sources of a model folder's chat templates by their names.

    The order of transformers: ``chat_template.jinja`` is the template ``default``, and
    ``additional_chat_templates/NAME.jinja`` the template NAME. The templates in
    ``tokenizer_config.json`` count only if ``chat_template.jinja`` is missing.
    """
    files = {"default": folder / _TEMPLATE_FILE}
    named = sorted((folder / _TEMPLATE_FOLDER).glob("*.jinja"))
    files |= {path.stem: path for path in named}
    found = {
        name: read_text(path, error=TokenizerError)
        for name, path in files.items()
        if path.is_file()
    }
    if "default" in found:
        return found
    return {**_templates_of_config(folder, config), **found}


def _templates_of_config(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    source = config.get("chat_template")
    if source is None:
        return {}
    if isinstance(source, str):
        return {"default": source}
    try:
        return {entry["name"]: entry["template"] for entry in source}
    except (TypeError, KeyError) as error:
        msg = (
            f"{folder}: expected chat_template to be a string or a list of names and templates, "
            f"found {source!r:.60}"
        )
        raise TokenizerError(msg) from error
