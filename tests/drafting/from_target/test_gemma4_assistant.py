"""Gemma 4's assistant: drafts equal those of transformers, and texts those of plain decoding."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from checkpoints import MakeCheckpoint
from covering import covering
from drafting.drafting import Watched, assert_plain, sampler_at, text
from drafting.from_target.random_assistant import (
    AssistantOracle,
    copying_folder,
    write_for_gemma4,
)
from drafting.from_target.trained_eagle import bigram_decoder
from engine.cases import total
from models.test_loader import load
from pronk import LLM, Gemma4Assistant, SamplingParams
from pronk.base.arrays import INT8, Array
from pronk.base.errors import ConfigError, OptionError, PronkError
from pronk.drafting import Auto, DraftLogits, Proposer, make_drafter
from pronk.drafting.from_target._assistant_runner import AssistantRunner
from pronk.engine.engine import Engine
from pronk.engine.request import Request
from pronk.models.forward_batch import ForwardBatch
from tiny_models import kernels, make_engine, make_request, run

WIDTH = 48  # of the target
CLUSTERS = 12  # of 25 tokens
PROMPTS = [[1, 2, 3], [5], [token % 300 for token in text(7, 40)]]


class Pair:
    """A target and its assistant, in files."""

    def __init__(self, target: Path, assistant: Path) -> None:
        self.target = target
        self.assistant = assistant

    def engine(self, **options: Any) -> Engine:
        return make_engine(load(self.target, kernels=kernels()), folder=self.target, **options)

    def spec(self, **options: Any) -> str:
        given = "".join(f", {name}={value!r}" for name, value in options.items())
        return f"gemma4_assistant(model={str(self.assistant)!r}{given})"


HEADS = {"full head": 0, "two stages": CLUSTERS}


@pytest.fixture(scope="module")
def pairs(checkpoint: MakeCheckpoint, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Pair]:
    target = checkpoint("gemma4_text")
    root = tmp_path_factory.mktemp("assistants")
    return {
        head: Pair(target, write_for_gemma4(root / str(count), WIDTH, clusters=count))
        for head, count in HEADS.items()
    }


@pytest.fixture(params=HEADS)
def pair(request: pytest.FixtureRequest, pairs: dict[str, Pair]) -> Pair:
    """A target with an assistant of each kind of head."""
    return pairs[request.param]


@pytest.fixture
def two_stages(pairs: dict[str, Pair]) -> Pair:
    return pairs["two stages"]


def make_requests(
    prompts: list[list[int]], drafter: Proposer[Any] | None = None, **options: Any
) -> list[Request]:
    """Return a request for each prompt, with a seed of its own."""
    params = [
        SamplingParams(**{"max_tokens": 14, "seed": seed, "ignore_eos": True, **options})
        for seed in range(len(prompts))
    ]
    return [make_request(prompt, own, drafter) for prompt, own in zip(prompts, params, strict=True)]


def decode(
    engine: Engine, drafter: Proposer[Any], prompts: list[list[int]], **options: Any
) -> list[Request]:
    """Decode prompts in one batch; the outputs must be those of plain decoding."""
    requests = make_requests(prompts, drafter, **options)
    run(engine, requests)
    assert_plain(engine, requests)
    return requests


@pytest.mark.few(2)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_drafts_equal_those_of_transformers(pair: Pair, temperature: float) -> None:
    """The texts are longer than the window of the target's sliding layers."""
    engine = pair.engine()
    drafter = Watched(make_drafter(pair.spec(num_tokens=4)).bind(engine.target))
    requests = decode(engine, drafter, PROMPTS, temperature=temperature)
    oracle = AssistantOracle(pair.target, pair.assistant)
    num_drafted = 0
    for request in requests:
        for asked in drafter.of(request)[::2]:
            if len(asked.tokens) == 1:
                assert not asked.tree.num_draft_tokens
                continue
            oracle.begin(asked.tokens)
            sampler = sampler_at(request, asked.tokens)
            for token in asked.tree.tokens[1:]:
                assert token == sampler.choose(oracle.logits)
                oracle.add(token)
                sampler.advance(token)
            num_drafted += asked.tree.num_draft_tokens
    assert num_drafted > 40


def test_logits_are_close_to_those_of_transformers(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = list[DraftLogits]()
    run_layers = AssistantRunner._run_layers

    def watched(self: AssistantRunner, batch: ForwardBatch, stream: Array) -> list[DraftLogits]:
        logits = run_layers(self, batch, stream)
        rows.extend(logits)
        return logits

    monkeypatch.setattr(AssistantRunner, "_run_layers", watched)
    engine = pair.engine()
    drafter = Watched(make_drafter(pair.spec(num_tokens=4)).bind(engine.target))
    (request,) = decode(engine, drafter, PROMPTS[2:])
    oracle = AssistantOracle(pair.target, pair.assistant)
    found = iter(rows)
    for asked in drafter.of(request):
        for number, token in enumerate(asked.tree.tokens[1:]):
            if number:
                oracle.add(asked.tree.tokens[number])
            else:
                oracle.begin(asked.tokens)
            logits, ids = next(found)
            wanted = oracle.logits if ids is None else oracle.logits[ids]
            np.testing.assert_allclose(logits, wanted, rtol=1e-4, atol=1e-4)
            assert token == oracle.logits.argmax()
    assert len(rows) > 20
    assert next(found, None) is None


def test_right_drafts_are_accepted() -> None:
    spec = f"gemma4_assistant(model={copying_folder()!r}, num_tokens=4)"
    engine = make_engine(bigram_decoder())
    drafter = make_drafter(spec).bind(engine.target)
    requests = decode(engine, drafter, PROMPTS[:2], max_tokens=30)
    assert total(requests, "accepted") > 0.9 * total(requests, "drafted")
    assert total(requests, "target_steps") < 0.4 * total(requests, "generated_tokens")


# What each case of a text's equality changes in the engine.
ENGINES: dict[str, dict[str, Any]] = {
    "plain": {},
    "8-bit cache": {"kv_dtype": INT8},
    "shared prefixes": {"share_prefixes": True},
    "preemptions": {"num_blocks": 8, "block_size": 16},
}
WRAPPERS = ("{}", "threshold({})", "merged(prompt_lookup(min_ngram=1), {})")


@pytest.mark.few(4)
@pytest.mark.parametrize(
    ("head", "settings", "wrapper"), covering([*HEADS], [*ENGINES], WRAPPERS), ids=str
)
def test_texts_are_those_of_plain_decoding(
    head: str, settings: str, wrapper: str, pairs: dict[str, Pair]
) -> None:
    pair = pairs[head]
    options = ENGINES[settings]
    prompts = [*PROMPTS, PROMPTS[2], text(3, 60)]
    plain = make_requests(prompts, temperature=0.8, max_tokens=30)
    run(pair.engine(kv_dtype=options.get("kv_dtype")), plain)
    engine = pair.engine(**options)
    drafter = make_drafter(wrapper.format(pair.spec(num_tokens=3))).bind(engine.target)
    # the second time, the prefixes of the prompts may be cached
    for _ in range(1 + ("share_prefixes" in options)):
        requests = make_requests(prompts, drafter, temperature=0.8, max_tokens=30)
        run(engine, requests)
        assert [each.output for each in requests] == [each.output for each in plain]
        assert total(requests, "drafted") > 60
    assert (total(requests, "preemptions") > 0) == (settings == "preemptions")
    assert (total(requests, "cached_tokens") > 0) == (settings == "shared prefixes")


def test_samples_of_one_prompt(two_stages: Pair) -> None:
    llm = LLM(two_stages.target, drafter=two_stages.spec(), prefix_cache=True, budget="all")
    params = SamplingParams(max_tokens=20, seed=3, temperature=0.9, ignore_eos=True, n=2)
    prompt = PROMPTS[2]
    (drafted,) = llm.generate([prompt], params)
    (plain,) = llm.generate([prompt], params, drafter="autoregressive")
    samples = [drafted, *drafted.others]
    assert [each.token_ids for each in samples] == [
        each.token_ids for each in (plain, *plain.others)
    ]
    assert all(each.stats.drafted > 10 for each in samples)
    assert samples[0].token_ids != samples[1].token_ids


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_quantized_weights(two_stages: Pair, weights: str) -> None:
    engine = two_stages.engine()
    drafter = make_drafter(two_stages.spec(weights=weights)).bind(engine.target)
    assert total(decode(engine, drafter, PROMPTS), "drafted") > 40
    (runner,) = drafter.models
    assert {linear.packed.format.split()[0] for linear in runner.assistant.linears()} >= {weights}


def test_the_folder_beside_the_target_is_found(two_stages: Pair, tmp_path: Path) -> None:
    target = tmp_path / "gemma"
    shutil.copytree(two_stages.target, target)
    options = Gemma4Assistant()
    bound = replace(two_stages.engine().target, folder=target)
    config = bound.decoder.config
    assert options.find_default(target, config) is None
    with pytest.raises(OptionError, match='gemma4_assistant: expected model="…", a folder'):
        options.bind(bound)
    shutil.copytree(two_stages.assistant, tmp_path / "gemma-assistant")
    assert options.find_default(target, config) == tmp_path / "gemma-assistant"
    assert {part.name for part in Auto().bind(bound).parts} >= {"gemma4_assistant"}
    (tmp_path / "gemma-assistant" / "config.json").write_text('{"model_type": "llama"}')
    assert options.find_default(target, config) is None


# Changes of ``config.json``, by the name of the object that they are in; and the refusal.
REFUSED: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"model_type": "gemma4_text"}, {}, "model_type: expected gemma4_assistant, found 'gemma4_t"),
    ({"backbone_hidden_size": 64}, {}, "backbone_hidden_size: expected 48, that of the target, f"),
    ({"tie_word_embeddings": False}, {}, "tie_word_embeddings: expected true, found false"),
    ({"text_config": 3}, {}, "text_config: expected an object, found 3"),
    ({}, {"vocab_size": 360}, "vocab_size: expected 300, that of the target, found 360"),
    ({"num_centroids": 7}, {}, "num_centroids: expected a divisor of vocab_size = 300, found 7"),
    ({}, {"head_dim": 16}, "head_dim: layer 0: expected 8, that of the target, found 16"),
    ({}, {"sliding_window": 9}, "sliding_window: layer 0: expected 8, that of the target, found 9"),
    ({}, {"num_attention_heads": 3}, "3 attention heads cannot share 2"),
    ({}, {"num_kv_shared_layers": 2}, "num_kv_shared_layers: expected 4 as num_hidden_layers"),
    ({}, {"hidden_size_per_layer_input": 8}, "hidden_size_per_layer_input: expected 0 or false"),
    ({}, {"use_double_wide_mlp": True}, "use_double_wide_mlp: expected 0 or false"),
    ({}, {"model_type": "llama"}, "text_config: model_type: expected gemma4_text, found 'llama'"),
]


@pytest.mark.parametrize(("own", "text_config", "message"), REFUSED, ids=str)
def test_other_configs_are_refused(
    two_stages: Pair, own: dict[str, Any], text_config: dict[str, Any], message: str, tmp_path: Path
) -> None:
    folder = tmp_path / "assistant"
    shutil.copytree(two_stages.assistant, folder)
    document = json.loads((folder / "config.json").read_text())
    document["text_config"] |= text_config
    document |= own
    (folder / "config.json").write_text(json.dumps(document))
    check_refused(two_stages, folder, message)


def check_refused(two_stages: Pair, folder: Path, message: str) -> None:
    drafter = make_drafter(f"gemma4_assistant(model={str(folder)!r})")
    with pytest.raises(PronkError, match=re.escape(message)) as caught:
        drafter.bind(two_stages.engine().target)
    assert "\n" not in str(caught.value)
    assert str(folder) in str(caught.value)


@pytest.mark.parametrize(
    ("pattern", "change", "message"),
    [
        ("pre_projection.weight", None, "pre_projection.weight"),
        ("model.layers.1.self_attn.q_proj.weight", (32, 32), "q_proj.weight"),
        ("model.norm.weight", (31,), "norm.weight"),
        ("unknown.weight", (3,), "unknown.weight"),
    ],
)
def test_damaged_tensors_are_refused(
    two_stages: Pair, pattern: str, change: tuple[int, ...] | None, message: str, tmp_path: Path
) -> None:
    folder = tmp_path / "assistant"
    shutil.copytree(two_stages.assistant, folder)
    tensors = load_file(folder / "model.safetensors")
    tensors.pop(pattern, None)
    if change is not None:
        tensors[pattern] = np.zeros(change, np.float32)
    save_file(tensors, folder / "model.safetensors")
    check_refused(two_stages, folder, message)


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (None, "expected the tokens of the clusters, found none"),
        (np.zeros(300, np.int64), "expected each of 300 tokens once, found others"),
        (np.arange(299), "expected each of 300 tokens once, found others"),
        (np.zeros(300, np.float32), "found F32"),
    ],
    ids=["none", "one token", "too few", "floats"],
)
def test_damaged_clusters_are_refused(
    two_stages: Pair, tokens: Array | None, message: str, tmp_path: Path
) -> None:
    folder = tmp_path / "assistant"
    write_for_gemma4(folder, WIDTH, clusters=CLUSTERS)
    tensors = load_file(folder / "model.safetensors")
    name = "masked_embedding.token_ordering"
    tensors.pop(name)
    if tokens is not None:
        tensors[name] = tokens
    save_file(tensors, folder / "model.safetensors")
    check_refused(two_stages, folder, message)


def test_an_assistant_is_no_model(two_stages: Pair) -> None:
    with pytest.raises(ConfigError, match=r"drafts for a Gemma 4.*drafter=.gemma4_assistant"):
        LLM(two_stages.assistant)
