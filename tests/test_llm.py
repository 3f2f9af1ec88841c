"""``LLM`` on small random checkpoints of every family; greedy tokens are compared with
transformers.
"""

import asyncio
import json
import math
import shutil
import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from checkpoints import MakeCheckpoint, make_checkpoint
from drafting.trees import TreeDrafter, oracle_trees
from pronk import (
    LLM,
    CheckpointError,
    Completion,
    OptionError,
    PromptError,
    PronkError,
    SamplingParams,
    TokenTree,
)
from pronk.async_llm import AsyncLLM
from pronk.base.arrays import DTYPES
from pronk.base.errors import CacheFullError
from pronk.checkpoint.config import RecurrentConfig
from pronk.drafting import DraftContext, Outcome, Proposer
from pronk.engine.request import Request

FAMILIES: list[tuple[str, dict[str, Any]]] = [
    ("llama", {}),
    ("llama", {"num_key_value_heads": 6, "tie_word_embeddings": True}),
    ("mistral", {"sliding_window": 20}),
    ("qwen2", {}),
    ("qwen3", {}),
    ("gpt2", {}),
]
PROMPTS = [
    "def add(a, b):\n    return",
    "The quick brown fox",
    "for i in range(10):\n    print(i",
    "Grüße aus",
]


@pytest.fixture(scope="module")
def llm(checkpoint: MakeCheckpoint) -> LLM:
    return LLM(checkpoint("llama"), drafter="prompt_lookup(min_ngram=1)", budget="all")


def transformers_greedy(folder: Path, prompt: Sequence[int], count: int) -> list[int]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = torch.tensor([prompt])
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        min_new_tokens=count,
        max_new_tokens=count,
    )
    return [int(token) for token in out[0, len(prompt) :]]


@pytest.mark.few(2)
@pytest.mark.parametrize(("family", "overrides"), FAMILIES, ids=str)
def test_greedy_tokens_are_those_of_transformers(
    checkpoint: MakeCheckpoint, family: str, overrides: dict[str, Any]
) -> None:
    folder = checkpoint(family, **overrides)
    # min_new_tokens of transformers bans the end of text, so ban it here as well.
    params = SamplingParams(max_tokens=128, min_tokens=128)
    llm = LLM(folder, drafter="prompt_lookup(min_ngram=1)", budget="all")
    done = llm.generate(PROMPTS[0], params)
    assert done.token_ids == transformers_greedy(folder, done.prompt_token_ids, 128)
    assert done.stats.drafted > 0
    assert done.stats.generated_tokens == 128


def test_completions_have_the_order_of_the_prompts(llm: LLM) -> None:
    params = SamplingParams(max_tokens=20, temperature=0.9, seed=4)
    together = llm.generate(PROMPTS, params)
    alone = [llm.generate(prompt, params) for prompt in PROMPTS]
    assert [done.token_ids for done in together] == [done.token_ids for done in alone]
    assert [done.text for done in together] == [done.text for done in alone]
    assert llm.generate([], params) == llm.generate([], []) == llm.generate([]) == []


def test_params_may_differ_by_prompt(llm: LLM) -> None:
    options = [SamplingParams(max_tokens=n, ignore_eos=True) for n in (1, 7, 3, 12)]
    assert [len(done.token_ids) for done in llm.generate(PROMPTS, options)] == [1, 7, 3, 12]
    with pytest.raises(OptionError, match=r"one per prompt \(4\), found 2"):
        llm.generate(PROMPTS, options[:2])


def test_token_ids_and_text_are_the_same_prompt(llm: LLM) -> None:
    ids = llm.tokenizer.encode(PROMPTS[0])
    assert llm.generate(ids).token_ids == llm.generate(PROMPTS[0]).token_ids


def test_an_unseeded_request_reports_the_seed_that_repeats_it(llm: LLM) -> None:
    params = SamplingParams(max_tokens=24, temperature=1.5)
    first = llm.generate(PROMPTS[1], params)
    second = llm.generate(PROMPTS[1], params)
    assert first.seed != second.seed
    assert first.token_ids != second.token_ids
    again = llm.generate(
        PROMPTS[1], SamplingParams(max_tokens=24, temperature=1.5, seed=first.seed)
    )
    assert again.token_ids == first.token_ids


def test_samples_are_those_of_their_seeds(llm: LLM) -> None:
    params = SamplingParams(
        max_tokens=16, temperature=1.2, seed=9, n=3, logprobs=2, prompt_logprobs=1
    )
    done = llm.generate(PROMPTS[2], params)
    all_samples = [done, *done.others]
    assert len(all_samples) == 3
    assert len({tuple(sample.token_ids) for sample in all_samples}) == 3
    for sample in all_samples:
        alone = SamplingParams(
            max_tokens=16, temperature=1.2, seed=sample.seed, logprobs=2, prompt_logprobs=1
        )
        single = llm.generate(PROMPTS[2], alone)
        assert (single.token_ids, single.logprobs) == (sample.token_ids, sample.logprobs)
        assert single.prompt_logprobs == sample.prompt_logprobs


def test_a_stream_is_the_completion_piece_by_piece(llm: LLM) -> None:
    params = SamplingParams(max_tokens=40, temperature=1.0, seed=2, n=2)
    done = llm.generate(PROMPTS[3], params)
    pieces = list(llm.stream(PROMPTS[3], params))
    for index, sample in enumerate((done, *done.others)):
        own = [piece for piece in pieces if piece.index == index]
        assert "".join(piece.text for piece in own) == sample.text
        assert [piece.token_id for piece in own] == sample.token_ids
        assert [piece.completion is not None for piece in own] == [False] * (len(own) - 1) + [True]
        last = own[-1].completion
        assert last is not None
        assert (last.text, last.token_ids, last.seed) == (
            sample.text,
            sample.token_ids,
            sample.seed,
        )


def test_closing_a_stream_frees_its_memory(llm: LLM) -> None:
    expected = llm.generate(PROMPTS[0]).token_ids
    stream = llm.stream(PROMPTS[0], SamplingParams(max_tokens=100, ignore_eos=True))
    for _ in range(5):
        next(stream)
    stream.close()
    allocator = llm.engine.cache.allocator
    assert allocator.num_free == allocator.num_blocks
    assert llm.generate(PROMPTS[0]).token_ids == expected


def test_a_stream_of_samples_loses_nothing_to_another_call(llm: LLM) -> None:
    params = SamplingParams(max_tokens=12, temperature=1.0, seed=3, n=2, ignore_eos=True)
    expected = [(piece.index, piece.token_id) for piece in llm.stream(PROMPTS[0], params)]
    for before in (1, 3, 5):
        stream = llm.stream(PROMPTS[0], params)
        pieces = [next(stream) for _ in range(before)]
        llm.generate(PROMPTS[1], SamplingParams(max_tokens=40, ignore_eos=True))
        pieces += list(stream)
        assert sorted((piece.index, piece.token_id) for piece in pieces) == sorted(expected)
        assert sum(piece.completion is not None for piece in pieces) == 2


def test_ctrl_c_during_a_commit_waits_for_its_end(llm: LLM) -> None:
    params = SamplingParams(max_tokens=8, temperature=1.0, seed=1, ignore_eos=True)
    expected = [piece.token_id for piece in llm.stream(PROMPTS[0], params)]
    for when in (2, 4, 7):
        stream = llm.stream(PROMPTS[0], params)
        pieces = [next(stream)]
        text = llm.engine.scheduler.running[0].result.detokenizer
        calls = count(1)
        push = text.push

        def interrupted(
            token: int,
            *,
            is_end: bool,
            calls: Iterator[int] = calls,
            push: Any = push,
            when: int = when,
        ) -> Any:
            if next(calls) == when:
                signal.raise_signal(signal.SIGINT)
            return push(token, is_end=is_end)

        text.push = interrupted  # type: ignore[method-assign]
        with pytest.raises(KeyboardInterrupt):
            llm.generate(PROMPTS[1], SamplingParams(max_tokens=30, ignore_eos=True))
        pieces += list(stream)
        assert [piece.token_id for piece in pieces] == expected
        assert pieces[-1].completion is not None
        assert pieces[-1].completion.text == "".join(piece.text for piece in pieces)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_overflow_affects_only_its_own_request(
    checkpoint: MakeCheckpoint, tmp_path: Path, dtype: str
) -> None:
    folder = tmp_path / "overflow"
    shutil.copytree(checkpoint("llama"), folder)
    weights = {
        name: tensor.clone() for name, tensor in load_file(folder / "model.safetensors").items()
    }
    weights["model.embed_tokens.weight"][77] *= 1e39
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    llm = LLM(folder, dtype=dtype, kv_memory="5MB")
    params = SamplingParams(max_tokens=8, seed=1, ignore_eos=True)
    expected = llm.generate([1, 2, 3, 40], params).token_ids
    stream = llm.stream([1, 2, 3, 40], params)
    pieces = [next(stream)]
    with pytest.raises(
        PronkError, match=rf"expected finite logits, found infinity or NaN in {dtype}: "
    ):
        llm.generate([77] * 40, params)
    assert [piece.token_id for piece in [*pieces, *stream]] == expected
    assert llm.generate([1, 2, 3, 40], params).token_ids == expected


@dataclass(frozen=True)
class Odd(Proposer[int]):
    """Propose a chain of ``tokens`` below ``root`` or the last token; check that states are its
    own.
    """

    name = "odd"
    tokens: tuple[int, ...] = ()
    root: int | None = None

    def start(self, prompt: Sequence[int]) -> int:
        return id(self)

    def propose(self, contexts: Sequence[DraftContext[int]]) -> list[TokenTree]:
        assert all(context.state == id(self) for context in contexts)
        roots = [context.tokens[-1] if self.root is None else self.root for context in contexts]
        return [TokenTree.chain([root, *self.tokens]) for root in roots]

    def observe(self, outcome: Outcome[int]) -> None:
        assert outcome.state == id(self)


def test_no_drafter_can_change_the_text(llm: LLM) -> None:
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    expected = llm.generate(PROMPTS[0], params, drafter="autoregressive").token_ids
    for tokens in ((99999,), (-1, 5), (5, 300, 6)):
        got = llm.generate(PROMPTS[0], params, drafter=Odd(tokens))
        assert (got.token_ids, got.stats.draft_error) == (expected, None)
    got = llm.generate(PROMPTS[0], params, drafter=Odd(root=298))
    assert got.token_ids == expected
    assert got.stats.draft_error is not None
    assert "drafter odd: expected a tree with root token" in got.stats.draft_error


def test_equal_drafters_have_separate_states(llm: LLM) -> None:
    params = SamplingParams(max_tokens=6, ignore_eos=True)
    first = Odd((5,))
    second = Odd((5,))
    stream = llm.stream(PROMPTS[0], params, drafter=first)
    next(stream)
    llm.generate(PROMPTS[1], params, drafter=second)
    assert len(list(stream)) == 5


def test_two_streams_at_a_time_do_not_mix(llm: LLM) -> None:
    params = SamplingParams(max_tokens=30, ignore_eos=True)
    alone = [llm.generate(prompt, params).token_ids for prompt in PROMPTS[:2]]
    streams = [llm.stream(prompt, params) for prompt in PROMPTS[:2]]
    pairs = list(zip(*streams, strict=True))
    assert [[piece.token_id for piece in side] for side in zip(*pairs, strict=True)] == alone


def oracle(llm: LLM, prompt: str, params: SamplingParams) -> TreeDrafter:
    """Return a drafter whose draft tokens are mostly those of the text without stop strings."""
    free = SamplingParams(max_tokens=params.max_tokens, ignore_eos=True)
    known = llm.generate(prompt, free, drafter="autoregressive")
    text = [*known.prompt_token_ids, *known.token_ids]
    return TreeDrafter(
        oracle_trees(0.95), {(tuple(known.prompt_token_ids), params.seed or 0): text}, vocab=300
    )


@pytest.mark.parametrize("place", [1, 2, 3, 5, 8, 13, 21, 34])
def test_stop_strings_are_found_inside_accepted_runs(llm: LLM, place: int) -> None:
    free = SamplingParams(max_tokens=48, ignore_eos=True)
    text = llm.generate(PROMPTS[0], free, drafter="autoregressive").text
    stop = text[place : place + 3]
    params = SamplingParams(max_tokens=48, ignore_eos=True, stop=stop, logprobs=1, seed=5)
    plain = llm.generate(PROMPTS[0], params, drafter="autoregressive")
    drafted = llm.generate(PROMPTS[0], params, drafter=oracle(llm, PROMPTS[0], params))
    assert drafted.text == plain.text == text[: text.index(stop)]
    assert drafted.token_ids == plain.token_ids
    assert drafted.logprobs == plain.logprobs
    assert len(plain.logprobs or ()) == len(plain.token_ids)
    assert (plain.finish_reason, plain.stop_reason) == ("stop", stop)
    assert stop in llm.tokenizer.decode(plain.prompt_token_ids + plain.token_ids)[len(PROMPTS[0]) :]
    if place > 8:
        assert drafted.stats.accepted > 0


def text_with_end(llm: LLM, earliest: int) -> tuple[Completion, SamplingParams]:
    """Return a text of letters that goes on after its first end-of-text token, which is not before
    ``earliest``.
    """
    end = llm.config.eos_ids[0]
    bias = {token: 100.0 for letter in "abcdefgh" for token in llm.tokenizer.encode(letter)} | {
        end: 100.0
    }
    for seed in range(200):
        params = SamplingParams(
            max_tokens=48, ignore_eos=True, temperature=0.7, seed=seed, logit_bias=bias
        )
        known = llm.generate(PROMPTS[0], params, drafter="autoregressive")
        if end in known.token_ids[earliest:-1] and end not in known.token_ids[:earliest]:
            return known, params
    pytest.fail("expected such a text, found none")


@pytest.mark.parametrize("earliest", [6, 13, 21])
def test_a_stop_string_that_names_a_special_token_stops_at_it(llm: LLM, earliest: int) -> None:
    """Also inside accepted runs of draft tokens, and with a text before or after the name."""
    name = "<|endoftext|>"
    (known, free) = text_with_end(llm, earliest)
    at = known.token_ids.index(llm.config.eos_ids[0])
    before, after = (llm.tokenizer.decode(known.token_ids[i : i + 1]) for i in (at - 1, at + 1))
    for stop, num_tokens in ((name, at + 1), (before + name, at + 1), (name + after, at + 2)):
        params = replace(free, stop=["never", stop], logprobs=1)
        plain = llm.generate(PROMPTS[0], params, drafter="autoregressive")
        texts = {
            (tuple(known.prompt_token_ids), known.seed): [*known.prompt_token_ids, *known.token_ids]
        }
        drafted = llm.generate(
            PROMPTS[0], params, drafter=TreeDrafter(oracle_trees(0.95), texts, vocab=300)
        )
        assert (plain.finish_reason, plain.stop_reason) == ("stop", stop)
        assert plain.token_ids == known.token_ids[:num_tokens]
        assert name not in plain.text
        assert known.text.startswith(plain.text)
        shown = ("text", "token_ids", "logprobs", "finish_reason", "stop_reason")
        assert [getattr(drafted, field) for field in shown] == [
            getattr(plain, field) for field in shown
        ]
        assert drafted.stats.accepted > 0


def test_the_name_of_the_end_of_text_is_a_stop_string_too(llm: LLM) -> None:
    name = "<|endoftext|>"
    bias = {llm.config.eos_ids[0]: 100.0}
    done = llm.generate(PROMPTS[0], SamplingParams(logit_bias=bias, stop=name))
    assert (done.text, done.finish_reason, done.stop_reason) == ("", "stop", name)


def test_bad_words_ban_special_tokens_by_name(llm: LLM) -> None:
    end = llm.config.eos_ids[0]
    params = SamplingParams(
        max_tokens=20, ignore_eos=True, temperature=1.0, seed=2, logit_bias={end: 8.0}
    )
    assert end in llm.generate(PROMPTS[0], params).token_ids
    assert (
        end not in llm.generate(PROMPTS[0], replace(params, bad_words=["<|endoftext|>"])).token_ids
    )


def test_a_longer_stop_string_does_not_hold_a_shorter_one_up(llm: LLM) -> None:
    free = SamplingParams(max_tokens=30, seed=1, temperature=1.0, ignore_eos=True, logprobs=0)
    text = llm.generate(PROMPTS[0], free).text
    one = llm.generate(PROMPTS[0], replace(free, stop=text[4:6]))
    both = llm.generate(PROMPTS[0], replace(free, stop=[text[4:6], text[4:7] + "\x01"]))
    assert (both.text, both.token_ids, both.logprobs) == (one.text, one.token_ids, one.logprobs)


def test_stop_strings_count_from_min_tokens_on(llm: LLM) -> None:
    free = SamplingParams(max_tokens=30, seed=1, temperature=1.0, ignore_eos=True)
    stop = llm.generate(PROMPTS[0], free).text[3:5]
    assert len(llm.generate(PROMPTS[0], replace(free, stop=stop)).token_ids) < 25
    assert len(llm.generate(PROMPTS[0], replace(free, stop=stop, min_tokens=25)).token_ids) >= 25


def test_a_stop_token_ends_the_text_and_is_not_in_it(llm: LLM) -> None:
    free = llm.generate(PROMPTS[1], SamplingParams(max_tokens=30, ignore_eos=True))
    token = free.token_ids[12]
    first = free.token_ids.index(token)
    done = llm.generate(
        PROMPTS[1], SamplingParams(max_tokens=30, ignore_eos=True, stop_token_ids=[token])
    )
    assert done.token_ids == free.token_ids[: first + 1]
    assert (done.finish_reason, done.stop_reason) == ("stop", token)
    assert free.text.startswith(done.text)
    assert len(done.text) < len(free.text)


def test_end_of_text_ends_it_unless_ignored(llm: LLM) -> None:
    bias = {llm.config.eos_ids[0]: 100.0}
    done = llm.generate(PROMPTS[0], SamplingParams(max_tokens=9, logit_bias=bias))
    assert (done.token_ids, done.text, done.finish_reason) == ([llm.config.eos_ids[0]], "", "stop")
    ignored = llm.generate(
        PROMPTS[0], SamplingParams(max_tokens=9, logit_bias=bias, ignore_eos=True)
    )
    assert (len(ignored.token_ids), ignored.finish_reason) == (9, "length")
    late = llm.generate(PROMPTS[0], SamplingParams(max_tokens=9, logit_bias=bias, min_tokens=4))
    assert len(late.token_ids) == 5
    assert late.token_ids[-1] == llm.config.eos_ids[0]


def test_bad_words_are_not_written(llm: LLM) -> None:
    free = llm.generate(PROMPTS[1], SamplingParams(max_tokens=30, ignore_eos=True))
    decode = llm.tokenizer.decode
    encode = llm.tokenizer.encode
    token = next(token for token in free.token_ids if encode(decode([token])) == [token])
    first = free.token_ids.index(token)
    params = SamplingParams(max_tokens=30, ignore_eos=True, bad_words=[decode([token])])
    done = llm.generate(PROMPTS[1], params)
    assert token not in done.token_ids
    assert done.token_ids[:first] == free.token_ids[:first]


def test_logprobs_are_those_of_the_model(llm: LLM) -> None:
    done = llm.generate(
        PROMPTS[2], SamplingParams(max_tokens=12, ignore_eos=True, logprobs=3, prompt_logprobs=2)
    )
    assert done.logprobs is not None
    assert done.prompt_logprobs is not None
    assert done.prompt_logprobs[0] is None
    rescored = llm.generate(
        done.prompt_token_ids + done.token_ids, SamplingParams(max_tokens=1, prompt_logprobs=3)
    ).prompt_logprobs
    assert rescored is not None
    assert rescored[len(done.prompt_token_ids) :] == done.logprobs
    for token, report in zip(done.token_ids, done.logprobs, strict=True):
        assert next(iter(report)) == token
        assert len(report) in (3, 4)
        assert all(value <= 0 and math.isfinite(value) for value in report.values())
        assert report[token] == max(report.values())


def test_a_completion_is_json(llm: LLM) -> None:
    done = llm.generate(PROMPTS[0], SamplingParams(max_tokens=5, n=2, logprobs=1, temperature=1.0))
    values = json.loads(json.dumps(done.to_dict()))
    assert values["text"] == done.text
    assert values["stats"]["generated_tokens"] == len(done.token_ids)
    assert len(values["others"]) == 1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_dtypes(checkpoint: MakeCheckpoint, dtype: str) -> None:
    """With the kernels, float16 weights stay float16, but activations and KV cache are float32."""
    llm = LLM(checkpoint("llama"), dtype=dtype, budget="all")
    done = llm.generate(PROMPTS[0], SamplingParams(max_tokens=8, ignore_eos=True))
    assert (
        llm.engine.runner.dtype
        == llm.engine.cache.dtype
        == DTYPES["float32" if dtype == "float16" else dtype]
    )
    assert llm.engine.runner.decoder.head.packed.data.dtype == DTYPES[dtype]
    assert llm.exact
    assert len(done.token_ids) == 8


def test_chat_needs_a_template(llm: LLM) -> None:
    with pytest.raises(PronkError, match="chat template"):
        llm.chat([{"role": "user", "content": "Hello"}])


def with_template(folder: Path, template: str) -> LLM:
    folder = make_checkpoint(folder, "llama")
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    return LLM(folder)


def test_chat_answers_the_rendered_conversation(tmp_path: Path) -> None:
    llm = with_template(
        tmp_path,
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}bot:{% endif %}",
    )
    messages = [{"role": "user", "content": "Hello"}]
    done = llm.chat(messages, SamplingParams(max_tokens=10))
    assert llm.tokenizer.decode(done.prompt_token_ids) == "user: Hello\nbot:"
    assert [
        p.token_id for p in llm.stream_chat(messages, SamplingParams(max_tokens=10))
    ] == done.token_ids
    parts = [
        {
            "role": "user",
            "content": [{"type": "text", "text": "Hello"}, {"type": "text", "text": "you"}],
        }
    ]
    assert llm.tokenizer.decode(llm.chat_ids(parts)) == "user: Hello\nyou\nbot:"


def test_conversations_have_branch_positions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The samples have them if the model has recurrent layers and a prefix cache, in both APIs;
    prompts have none.
    """
    llm = with_template(
        tmp_path, "{% for m in messages %}{{ m.role }}: {{ m.content }}.{% endfor %}"
    )
    layers = (True,) * llm.config.num_layers
    config = replace(llm.config, recurrent=RecurrentConfig(layers, 1, 1, 8, 8, 4))
    monkeypatch.setattr(llm.request_factory, "config", config)
    monkeypatch.setattr(llm.request_factory, "share_prefixes", True)
    added = list[Request]()
    add = llm.engine.add

    def record(request: Request) -> None:
        added.append(request)
        add(request)

    monkeypatch.setattr(llm.engine, "add", record)
    messages = [{"role": "user", "content": "Hello"}]
    params = SamplingParams(max_tokens=2, n=2)
    done = llm.chat(messages, params)
    assert [*llm.stream_chat(messages, params)]

    async def ask() -> Completion:
        async with AsyncLLM(llm) as made:
            return await made.chat(messages, params)

    assert asyncio.run(ask()).token_ids == done.token_ids
    (positions,) = {request.branch_positions for request in added}
    texts = [llm.tokenizer.decode(done.prompt_token_ids[:at]) for at in positions]
    assert texts == ["user:", "user: Hello."]
    assert len(added) == 6
    llm.generate(done.prompt_token_ids, params)
    assert added[-1].branch_positions == ()


def test_options_of_the_chat_template(tmp_path: Path) -> None:
    llm = with_template(
        tmp_path,
        "{{ messages[0].content }}{{ 'no thoughts' if enable_thinking is false else '?' }}",
    )
    messages = [{"role": "user", "content": "Hi"}]
    params = SamplingParams(max_tokens=4)
    options = {"enable_thinking": False}
    done = llm.chat(messages, params, template_options=options)
    assert llm.tokenizer.decode(done.prompt_token_ids) == "Hino thoughts"
    assert [
        p.token_id for p in llm.stream_chat(messages, params, template_options=options)
    ] == done.token_ids
    assert llm.chat_ids(messages, template_options=options) == done.prompt_token_ids
    assert llm.tokenizer.decode(llm.chat_ids(messages)) == "Hi?"


@pytest.mark.parametrize("name", ["messages", "tools", "add_generation_prompt"])
def test_template_options_that_would_be_ignored_are_refused(name: str, tmp_path: Path) -> None:
    llm = with_template(tmp_path, "{{ messages[0].content }}{{ documents }}")
    messages = [{"role": "user", "content": "a"}]
    with pytest.raises(
        OptionError, match=rf"template_options: expected names other than .*, found '{name}'"
    ):
        llm.chat(messages, template_options={name: None})
    with pytest.raises(
        OptionError, match=r"template_options: expected names with a value each, found \['a'\]"
    ):
        llm.chat(messages, template_options=["a"])  # type: ignore[arg-type]
    assert llm.tokenizer.chat(messages, options={"documents": ["b"]}) == "a['b']"


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        (None, "messages: expected a list of objects with 'role' and 'content', found None"),
        (
            "text",
            "messages: expected a list of objects with 'role' and 'content', found str 'text'",
        ),
        ([None], "messages[0]: expected an object with 'role' and 'content', found None"),
        (
            [{"role": "user", "content": "nothing"}],
            "the model's chat template: expected a text made of these messages",
        ),
    ],
)
def test_conversations_that_cannot_be_answered(tmp_path: Path, messages: Any, message: str) -> None:
    llm = with_template(tmp_path, "{{ messages[0].content if messages[0].content != 'nothing' }}")
    for ask in (llm.chat, llm.stream_chat, llm.chat_ids):
        with pytest.raises(PromptError) as caught:
            ask(messages)
        assert str(caught.value).startswith(message)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", "prompt: expected at least one token, found none"),
        ([], "prompt: expected at least one token, found none"),
        ([1, 300], r"prompt: expected token ids in 0\.\.299, found 300"),
        ([-1], r"prompt: expected token ids in 0\.\.299, found -1"),
        ([5] * 256, r"prompt: expected at most 255 tokens \(context 256\), found 256"),
    ],
)
def test_prompts_that_cannot_be_decoded(llm: LLM, prompt: Any, message: str) -> None:
    with pytest.raises(PromptError, match=message):
        llm.generate([prompt])


@pytest.mark.parametrize("prompt", [None, 5, [1.5], ["a", 3], [None], ["\ud800"]])
def test_prompts_of_another_kind(llm: LLM, prompt: Any) -> None:
    with pytest.raises(PromptError, match="expected"):
        llm.generate(prompt)


@pytest.mark.parametrize("params", [{"max_tokens": 3}, 128, [None]])
def test_params_of_another_kind(llm: LLM, params: Any) -> None:
    with pytest.raises(OptionError, match="params: expected SamplingParams"):
        llm.generate(["a"], params)
    with pytest.raises(OptionError, match="params: expected SamplingParams"):
        llm.stream("a", params)


def test_params_are_checked_before_a_drafter_is_loaded(llm: LLM) -> None:
    wrong: Any = 128
    for call in (llm.generate, llm.stream):
        with pytest.raises(OptionError, match="params: expected SamplingParams"):
            call("a", wrong, drafter="psychic", adapter="none")


def test_a_choice_without_options(llm: LLM) -> None:
    params = SamplingParams(
        max_tokens=8, min_tokens=8, stop_token_ids=list(range(300)), temperature=1.0, top_p=0.9
    )
    with pytest.raises(OptionError, match="every token banned"):
        llm.generate(PROMPTS[0], params)
    assert llm.generate(PROMPTS[0]).token_ids


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"max_tokens": 250},
            (
                r"max_tokens: expected at most 246 after a prompt of 10 tokens \(context 256\), "
                r"found 250"
            ),
        ),
        ({"logit_bias": {300: 1.0}}, r"logit_bias: expected token ids in 0\.\.299, found 300"),
        ({"stop_token_ids": [301]}, r"stop_token_ids: expected token ids in 0\.\.299, found 301"),
    ],
)
def test_options_that_do_not_fit_the_model(llm: LLM, options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        llm.generate([[5] * 10], SamplingParams(**options))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"drafter": "psychic"},
            "drafter: expected one of autoregressive, .*prompt_lookup.*, found 'psychic'",
        ),
        (
            {"drafter": "prompt_lookup(k=3)"},
            "prompt_lookup: expected one of max_ngram.*, found 'k'",
        ),
        ({"dtype": "int7"}, "int7"),
        ({"kv_memory": "lots"}, "kv_memory: expected .* found 'lots'"),
        ({"kv_memory": 10}, "kv_memory: expected at least .* found 10"),
        ({"kv_dtype": "int5"}, "kv_dtype: expected one of auto, int8, int4, found 'int5'"),
        ({"max_batch": 0}, r"max_batch: expected an integer in 1\.\.1024, found 0"),
        ({"prefill_chunk": 1}, r"prefill_chunk: expected an integer in 16\.\.8192, found 1"),
        ({"threads": -1}, r"threads: expected an integer in 1\.\.4096, found -1"),
        ({"prefix_cache": "no"}, r"prefix_cache: expected true or false, found 'no'"),
    ],
)
def test_options_of_the_model_out_of_range(
    checkpoint: MakeCheckpoint, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(OptionError, match=message):
        LLM(checkpoint("llama"), **options)


def test_a_cache_that_is_too_small_says_so(checkpoint: MakeCheckpoint) -> None:
    llm = LLM(checkpoint("llama"), kv_memory="60KB")
    with pytest.raises(
        CacheFullError,
        match=r"expected a request of at most \d+ tokens.* found \d+; raise kv_memory",
    ):
        llm.generate(PROMPTS[0], SamplingParams(max_tokens=200))
    assert llm.generate(PROMPTS[0], SamplingParams(max_tokens=4)).token_ids


def test_no_such_model(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no such folder"):
        LLM(tmp_path / "nothing")


@pytest.mark.parametrize("drafter", ["recycling"])
def test_a_bias_may_be_a_whole_number(llm: LLM, drafter: str) -> None:
    """JSON clients send integers; these drafters also add the bias to the logits that they read."""
    params = SamplingParams(max_tokens=8, ignore_eos=True, logit_bias={5: 3, 9: -2})
    got = llm.generate(PROMPTS[0], params, drafter=drafter)
    assert got.stats.draft_error is None
    assert got.token_ids == llm.generate(PROMPTS[0], params, drafter="autoregressive").token_ids
