import json
import runpy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from pronk import LLM, SamplingParams
from pronk.base.errors import OptionError
from pronk.drafting.shared.chain import Chain
from pronk.lab.drafters.multi_token import MultiTokenProposer
from pronk.models.loader import Fingerprint
from pronk.text.tokenizer import Tokenizer
from pronk.train.attention import DenseAttention, dense_logits, dense_rope, dense_states
from pronk.train.future import FutureModel, future_shape
from pronk.train.options import ModelShape
from train.kinds import Start, train
from train.tiny import SHAPE, run_command


def variant(kind: str, order: str, unembeddings: str, layers: int = 2) -> dict[str, Any]:
    shape = replace(SHAPE, layers=layers)
    return {"shape": shape, "heads": future_shape(shape, 3, kind, order, unembeddings)}


VARIANTS = [
    variant("transformer", "parallel", "shared"),
    variant("transformer", "causal", "shared"),
    variant("transformer", "anticausal", "shared", 4),
    variant("linear", "parallel", "shared"),
    variant("linear", "causal", "shared"),
    variant("transformer", "parallel", "replicated"),
]

pytestmark = pytest.mark.usefixtures("short_evaluation")


def test_a_run_with_heads_does_not_go_on_without(start: Start) -> None:
    train(start("future"), stop_at=1)
    with pytest.raises(OptionError, match=r"expected heads = \{.*as before, found None"):
        start("lm")


def disturb(model: FutureModel) -> None:
    """Add noise to all parameters, so that norms differ from 1 and layers from the identity."""
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)


def naive_hidden(model: FutureModel, inputs: Tensor) -> list[Tensor]:
    """Return the input of each unembedding as in the paper, the model's own head first."""
    decoder = model.decoder
    heads = model.heads
    (batch, length) = inputs.shape
    rope = dense_rope(decoder, batch, length, torch.float32, inputs.device)
    attend = DenseAttention(batch, length)
    outputs = [output for _, output in dense_states(decoder, inputs, torch.float32)]
    if heads.shape.order == "anticausal":  # the two heads are the last layers but one and but two
        return [decoder.norm(outputs[-1]), heads.norms[0](outputs[-2]), heads.norms[1](outputs[-3])]
    z = (
        outputs[-2]
        if (heads.shape.kind, heads.shape.order) == ("transformer", "parallel")
        else outputs[-1]
    )
    made = [decoder.norm(outputs[-1])]
    for index in range(2):
        out = heads.run_part(index, z, rope, attend)
        made.append(heads.norms[index](out))
        z = out if heads.shape.order == "causal" else z
    return made


@pytest.mark.parametrize("changes", VARIANTS, ids=lambda changes: str(changes["heads"]))
def test_gradients_head_by_head_are_those_of_equation_2(
    changes: dict[str, Any], start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    objective = start("future", **changes).objective
    monkeypatch.setattr("pronk.train.losses.product_dtype", lambda _: torch.float32)
    model = objective.module
    disturb(model)
    inputs, targets = objective.phases[0].batch(0, 3)
    losses = []
    for index, hidden in enumerate(naive_hidden(model, inputs)):
        own = (
            model.heads.unembeddings[index - 1].weight
            if index and model.heads.unembeddings
            else None
        )
        logits = (hidden @ (model.decoder.embedding if own is None else own).T).view(
            3, inputs.shape[1], -1
        )
        # one by one: the row at t predicts the token that is index places after the next one
        rows = [
            -logits[row, t].log_softmax(-1)[targets[row, t + index]]
            for row in range(3)
            for t in range(inputs.shape[1] - index)
        ]
        losses.append(torch.stack(rows).mean())
    (0.5 * torch.stack(losses).sum()).backward()
    expected = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    passed = objective.backward(inputs, targets, 0.5)
    assert passed.loss == pytest.approx(float(sum(loss.detach() for loss in losses)) / 3, rel=1e-5)
    assert set(expected) == {
        name for name, parameter in model.named_parameters() if parameter.grad is not None
    }
    for name, parameter in model.named_parameters():
        assert torch.allclose(parameter.grad, expected[name], rtol=1e-3, atol=1e-6), name
        assert parameter.grad.abs().max() > 0
    assert objective.measure(inputs, targets) == pytest.approx(
        [float(loss.detach()) for loss in losses], rel=1e-5
    )


def test_heads_are_compared_with_the_model_s_own_head(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    objective = start("future").objective
    monkeypatch.setattr("pronk.train.losses.product_dtype", lambda _: torch.float32)
    disturb(objective.module)
    inputs, targets = objective.phases[0].batch(0, 3)
    model = objective.module
    length = inputs.shape[1]
    with torch.no_grad():
        tokens = [
            (h @ model.decoder.embedding.T).argmax(-1).view(3, length)
            for h in naive_hidden(model, inputs)
        ]
    same = [float((tokens[i][:, :-i] == tokens[0][:, i:]).float().mean()) for i in (1, 2)]
    assert objective.backward(inputs, targets, 1.0).same == pytest.approx(same)


def test_without_heads_the_model_begins_as_it_would_with_them(start: Start) -> None:
    plain = start("lm").objective.module.state_dict()
    model = start("future").objective.module.decoder.state_dict()
    assert all(torch.equal(plain[name], model[name]) for name in plain)
    assert future_shape(SHAPE, 1, "transformer", "parallel", "shared") is None


@pytest.mark.parametrize("changes", VARIANTS, ids=lambda changes: str(changes["heads"]))
def test_exported_heads_propose_the_tokens_of_the_trained_ones(
    changes: dict[str, Any], start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checkpoint is an ordinary model, and the drafter in its folder proposes the tokens of
    the trained module.
    """
    objective = start("future", **changes).objective
    model = objective.module
    disturb(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16())
    objective.export(tmp_path / "export", "card", {})
    facts = json.loads((tmp_path / "export" / "heads" / "drafter.json").read_text())
    assert facts["kind"] == "multi_token"
    import transformers

    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "export", dtype=torch.float32
    )
    prompt = torch.tensor([[7, 90, 33, 5, 61, 200, 14]])
    with torch.no_grad():
        assert torch.allclose(
            theirs(prompt).logits[0], dense_logits(model.decoder, prompt), rtol=1e-3, atol=1e-3
        )
    drafted: list[tuple[list[int], list[int]]] = []
    chains = MultiTokenProposer.chains

    def watched(self: MultiTokenProposer, contexts: Any, stop: Any = None) -> list[Chain]:
        made = chains(self, contexts, stop)
        drafted.extend((list(each.context.tokens), each.tokens) for each in made)
        return made

    monkeypatch.setattr(MultiTokenProposer, "chains", watched)
    llm = LLM(tmp_path / "export", drafter="multi_token", dtype="float32", budget="all")
    params = SamplingParams(max_tokens=24, ignore_eos=True)
    out = llm.generate(prompt[0].tolist(), params)
    text = [*prompt[0].tolist(), *out.token_ids]
    with torch.no_grad():
        hidden = naive_hidden(model, torch.tensor([text]))
    own = model.heads.unembeddings
    draft_tokens = [
        (h @ (own[i].weight if own else model.decoder.embedding).T).argmax(-1).tolist()
        for i, h in enumerate(hidden[1:])
    ]
    assert drafted
    for tokens, chain in drafted:
        last = len(tokens) - 2  # the row that predicted the last token
        assert tokens == text[: len(tokens)]
        assert chain == [row[last] for row in draft_tokens][: len(chain)]
    assert {len(chain) for _, chain in drafted} >= {2}
    assert (
        out.token_ids
        == llm.generate(prompt[0].tolist(), params, drafter="autoregressive").token_ids
    )


def test_matrices_of_heads_and_trunk_go_to_the_same_optimizer(start: Start) -> None:
    trainer = start("future")
    muon = {
        id(p) for group in trainer.optimizers._optimizers[0].param_groups for p in group["params"]
    }
    names = {name for name, p in trainer.objective.module.named_parameters() if id(p) in muon}
    assert "heads.layers.1.down.weight" in names
    assert "decoder.layers.0.qkv.weight" in names
    assert "decoder.embedding" not in names
    assert len(names) == 4 * 4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, "transformer", "parallel"), "future-tokens: expected an integer in 1..64, found 0"),
        ((65, "transformer", "parallel"), "future-tokens: expected an integer in 1..64, found 65"),
        (
            (2, "transformer", "anticausal"),
            "layers: expected more than 2 for anticausal heads of 2 tokens, found 2",
        ),
        ((2, "linear", "anticausal"), "head-order: expected parallel or causal for linear heads"),
        ((2, "round", "parallel"), "kind: expected one of transformer, linear, found 'round'"),
    ],
)
def test_mistakes_are_named(arguments: tuple[int, str, str], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        future_shape(replace(SHAPE, layers=2), *arguments, "shared")


@pytest.mark.slow  # test_commands.py trains each kind
def test_bytes_and_heads_from_the_command(tmp_path: Path, corpus: Path) -> None:
    command = (
        f"lm --source {corpus / 'stories.jsonl'}=1 --out {tmp_path / 'run'} --bytes "
        "--future-tokens 4 --hidden 32 "
        "--layers 2 --heads 2 --kv-heads 1 --mlp 48 --positions 128 --steps 60 --batch 512 --micro "
        "512 --length 64 "
        "--final-length 128 --threads 1 --lr 0.01 --warmup 5 --evaluate-every 100"
    )
    run_command(command)
    export = tmp_path / "run" / "export"
    import transformers

    theirs = transformers.AutoTokenizer.from_pretrained(export)
    ours = Tokenizer.load(export)
    card, beside = ((export / each / "README.md").read_text() for each in ("", "heads"))
    assert "Its tokens are bytes: a vocabulary of 256 and 4 special tokens." in card
    assert "3 heads for the tokens 2 to 4 places ahead" in card
    assert "- sequences of 64 tokens, in the last 20% of the run of 128" in card
    facts = json.loads((export / "heads" / "drafter.json").read_text())
    assert facts["target"] == {"name": "pronk-tiny", **vars(Fingerprint.of(export))}
    assert f"- fingerprint: {Fingerprint.of(export)}" in beside
    assert f"| greedy | {facts['figures']['greedy alpha']:.3f} | " in beside
    assert f"stories 4 {facts['figures']['stories 4']:.3f}" in beside
    assert "--future-tokens 4" in beside
    text = "def f(x):\r\n\treturn 'é€😀' +  x "
    ids = ours.encode(text)
    assert len(ids) == len(text.encode())
    assert ours.vocab_size == 260
    assert ours.decode(ids) == theirs.decode(theirs.encode(text)) == text
    assert theirs.encode(text) == ids
    llm = LLM(export, drafter="multi_token", budget="all")
    for temperature in (0.0, 0.9):
        params = SamplingParams(max_tokens=60, temperature=temperature, seed=3)
        out = llm.generate("The ", params)
        plain = llm.generate("The ", params, drafter="autoregressive")
        assert out.token_ids == plain.token_ids
        assert out.stats.accepted > 10
        assert len(out.stats.steps) < len(plain.stats.steps)


def test_peak_memory_is_that_of_one_head() -> None:
    """Four heads take less than 1.3 times the memory of one, unless their losses are summed
    first.
    """
    path = Path(__file__).parents[2] / "benchmarks" / "head_memory.py"
    measure = runpy.run_path(str(path))["measure"]
    shape = ModelShape(hidden=32, layers=4, heads=2, kv_heads=1, mlp=64, vocab=8192, context=64)
    peaks = {(name, count): size for name, count, size in measure(shape, 1024, 64)}
    assert peaks["head by head", 4] < 1.3 * peaks["head by head", 1]
    assert peaks["head by head", 4] < peaks["the language model", 1]
    assert peaks["all at once", 4] > 1.5 * peaks["all at once", 1]
