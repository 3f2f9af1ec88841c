"""The texts of one request share a limit of processor time, below which many ordinary texts
stay.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from pronk import LLM, SamplingParams
from pronk.base.errors import PromptError, TokenizerError
from pronk.drafting.autoregressive import Autoregressive
from pronk.engine.pooling import EmbeddingOptions
from pronk.engine.request_factory import RequestFactory
from pronk.testing import byte_tokenizer
from pronk.text.guarded import SECONDS, GuardedTokenizer, TimeLimit, load_backend, shared_time
from pronk.text.limited_process import ChildReply, LimitedProcess
from pronk.text.tokenizer import Tokenizer

NUM_TEXTS = 100
MARK = "<mark>"
CONVERTED = json.dumps({"ids": [1], "offsets": [], "mask": [], "text": "a"}).encode()


class Clock:
    """A child process whose requests take a given processor time each, and its limits."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.limits = list[float]()

    def ask(self, _: bytes, limit: float) -> ChildReply | None:
        self.limits.append(limit)
        return ChildReply(CONVERTED, self.seconds) if self.seconds < limit else None


@pytest.fixture(scope="module")
def factory() -> RequestFactory:
    """Return a factory of requests with a tokenizer that encodes and decodes in child processes."""
    backend = byte_tokenizer()
    backend.add_special_tokens([AddedToken(MARK, normalized=False)])
    split = pre_tokenizers.Split(Regex("x{3}"), "isolated")
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(False, use_regex=False)]
    )
    backend.decoder = decoders.Sequence(
        [decoders.ByteLevel(), decoders.Replace(Regex("x{3}"), "y")]
    )
    tokenizer = Tokenizer(load_backend(backend.to_str()))
    config = LLM("pronk-tiny").config
    return RequestFactory(config, tokenizer, None)


def create_batch(factory: RequestFactory, texts: Sequence[str]) -> None:
    params = [SamplingParams(max_tokens=1)] * len(texts)
    factory.create_batch([*texts], params, Autoregressive(), None)


def create_embeddings(factory: RequestFactory, texts: Sequence[str]) -> None:
    runner: Any = type("Runner", (), {"final_norm": None})
    factory.create_embeddings(texts, EmbeddingOptions(), runner)


def encode_marks(factory: RequestFactory, texts: Sequence[str]) -> None:
    """Encode one untrusted text: each name of a special token in it is encoded on its own."""
    factory.tokenizer.encode_plain(MARK.join(texts))


REQUESTS: dict[str, Callable[[RequestFactory, Sequence[str]], object]] = {
    "backend, batch": lambda factory, texts: factory.tokenizer.backend.encode_batch([*texts]),
    "backend, fast": lambda factory, texts: factory.tokenizer.backend.encode_batch_fast([*texts]),
    "backend, "
    "tokens": lambda factory, texts: factory.tokenizer.backend.decode_batch([[1] for _ in texts]),
    "tokenizer": lambda factory, texts: factory.tokenizer.encode_batch(texts),
    "untrusted text": encode_marks,
    "prompts": lambda factory, texts: factory.encode_prompts(texts),
    "samples": create_batch,
    "embeddings": create_embeddings,
    "scores": lambda factory, texts: factory.encode_continuations([1], [1], texts),
}  # fmt: skip


@pytest.mark.parametrize("request_texts", REQUESTS.values(), ids=REQUESTS)
def test_texts_of_a_request_share_a_limit(
    factory: RequestFactory, request_texts: Callable[..., object], monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = Clock(SECONDS / 10)
    monkeypatch.setattr(LimitedProcess, "ask", lambda _, line, limit: slow.ask(line, limit))
    for _ in range(2):  # the limit of another request is its own
        slow.limits.clear()
        with pytest.raises((PromptError, TokenizerError), match="exceeds a limit"):
            request_texts(factory, ["a"] * NUM_TEXTS)
        assert 9 <= len(slow.limits) <= 12
        assert sorted(slow.limits, reverse=True) == slow.limits


@pytest.mark.parametrize("request_texts", REQUESTS.values(), ids=REQUESTS)
def test_many_ordinary_texts_stay_below_the_limit(
    factory: RequestFactory, request_texts: Callable[..., object], monkeypatch: pytest.MonkeyPatch
) -> None:
    ordinary = Clock(0.0009)  # seconds a text, 4.5 in all, more than the limit of one text
    monkeypatch.setattr(LimitedProcess, "ask", lambda _, line, limit: ordinary.ask(line, limit))
    request_texts(factory, ["a"] * 5_000)
    assert len(ordinary.limits) >= 5_000


def test_blocks_within_a_block_share_its_limit(
    factory: RequestFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = Clock(SECONDS / 4)
    monkeypatch.setattr(LimitedProcess, "ask", lambda _, line, limit: slow.ask(line, limit))
    for _ in range(2):
        factory.tokenizer.encode_batch(["a", "b", "c"])
    with shared_time():
        factory.tokenizer.encode_batch(["a", "b", "c"])
        with pytest.raises(PromptError, match="exceeds a limit"):
            factory.tokenizer.encode_batch(["a", "b", "c"])


def test_jobs_of_a_request_share_its_limit(
    factory: RequestFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = Clock(SECONDS / 4)
    monkeypatch.setattr(LimitedProcess, "ask", lambda _, line, limit: slow.ask(line, limit))
    limit = TimeLimit()
    factory.encode_prompts(["a", "b", "c"], limit)
    with pytest.raises(PromptError, match="exceeds a limit"):
        factory.encode_prompts(["a", "b", "c"], limit)
    with pytest.raises(PromptError, match="exceeds a limit"):
        factory.encode_prompts(["a"], limit)
    factory.encode_prompts(["a", "b", "c"], TimeLimit())


def unigram(num_tokens: int) -> str:
    """Return the file of an ordinary Unigram tokenizer."""
    letters = [(chr(number), -10.0) for number in range(32, 0x3000)]
    words = [(f"▁to{number}", -12.0) for number in range(num_tokens)]
    backend = Backend(
        models.Unigram([("<unk>", 0.0), *letters, *words], unk_id=0, byte_fallback=False)
    )
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    return backend.to_str()


@pytest.mark.parametrize("num_tokens", [1000, pytest.param(240_000, marks=pytest.mark.slow)])
def test_long_prompts_of_ordinary_tokenizers(num_tokens: int) -> None:
    backend = load_backend(unigram(num_tokens))
    assert isinstance(backend, GuardedTokenizer)
    text = ("hello world, this is a text. " * 40_000)[: 2**20]
    assert len(Tokenizer(backend).encode(text)) == len(text) + 1
    backend.stop()
