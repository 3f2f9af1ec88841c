"""``pronk train lm --init`` goes on from a checkpoint: heads are kept, added or stripped (section
3.6).
"""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from checkpoints import MakeCheckpoint
from pronk.base.errors import OptionError
from pronk.llm import LLM
from pronk.text.tokenizer import Tokenizer
from pronk.train.export import InitialModel
from pronk.train.future import FutureModel, future_shape
from pronk.train.lm import LanguageModel
from pronk.train.teacher import Teacher
from train.kinds import FUTURE, begin, train
from train.tiny import SHAPE, link, refusal, run_command

pytestmark = pytest.mark.usefixtures("short_evaluation")

PACE = (
    "--steps 4 --batch 128 --micro 64 --length 32 --final-length 64 --final-share 0.25 --threads 1 "
    "--warmup 1"
)


@pytest.fixture(scope="module")
def with_heads(prepared: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model that predicts three tokens, with parallel heads."""
    trainer = train(begin("future", link(prepared, tmp_path_factory.mktemp("heads")), steps=6))
    folder = trainer.folder / "export"
    trainer.objective.export(folder, "", {})
    return folder


def command(init: object, out: Path, corpus: Path, more: str = "") -> str:
    return f"lm --init {init} --source {corpus / 'stories.jsonl'}=1 --out {out} {PACE} {more}"


def test_training_goes_on_with_the_weights_and_the_tokenizer(
    teacher: Teacher, corpus: Path, tmp_path: Path
) -> None:
    """A tiny learning rate leaves the weights nearly as they were; the usual one lowers the
    loss.
    """
    run_command(command(teacher.folder, tmp_path / "still", corpus, "--lr 1e-9 --weight-decay 0"))
    before, after = (
        load_file(each / "model.safetensors")
        for each in (teacher.folder, tmp_path / "still" / "export")
    )
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    output = run_command(command(teacher.folder, tmp_path / "run", corpus, "--lr 3e-3"))
    assert "finished" in output
    trained = load_file(tmp_path / "run" / "export" / "model.safetensors")
    assert not torch.equal(before["model.norm.weight"], trained["model.norm.weight"])
    llm = LLM(tmp_path / "run" / "export", threads=1)
    assert llm.tokenizer.fingerprint == teacher.llm.tokenizer.fingerprint
    card = (tmp_path / "run" / "export" / "README.md").read_text(encoding="utf-8")
    assert "trained further on the text below" in card
    assert "Byte-level BPE" not in card


def test_heads_are_kept_dropped_added_and_stripped(with_heads: Path) -> None:
    initial = InitialModel.read(str(with_heads))
    stored = load_file(with_heads / "heads" / "model.safetensors")
    for tokens in (2, 3, 4):
        shape = initial.heads_for(tokens)
        assert shape is not None
        assert (shape.num_heads, shape.layer) == (tokens - 1, SHAPE.layers - 1)
        model = FutureModel(initial.config, shape)
        model.initialize(0, initial)
        state = model.heads.state_dict()
        kept = {name for name in state if int(name.split(".")[1]) < 2}
        assert kept <= stored.keys()
        assert all(torch.equal(state[name], stored[name].float()) for name in kept)
        assert all(
            torch.equal(state[name], model.decoder.norm.weight)
            for name in state
            if name == "norms.2.weight"
        )
        assert ("norms.2.weight" in state) == (tokens == 4)
    assert initial.heads_for(1) is None


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("more", "heads"),
    [("", 2), ("--future-tokens 2", 1), ("--future-tokens 4", 3), ("--future-tokens 1", 0)],
)
def test_commands_for_heads(
    with_heads: Path, corpus: Path, tmp_path: Path, more: str, heads: int
) -> None:
    run_command(command(with_heads, tmp_path / "run", corpus, more))
    folder = tmp_path / "run" / "export" / "heads"
    assert folder.exists() == bool(heads)
    if heads:
        assert (
            json.loads((folder / "drafter.json").read_text(encoding="utf-8"))["shape"]["num_heads"]
            == heads
        )


@pytest.mark.parametrize("order", ["parallel", "causal"])
def test_heads_are_added_to_a_model_without(order: str, teacher: Teacher) -> None:
    initial = InitialModel.read(str(teacher.folder))
    shape = future_shape(SHAPE, 2, "transformer", order, "replicated")
    assert shape is not None
    model = FutureModel(initial.config, shape)
    model.initialize(0, initial)
    weights = initial.weights()
    assert all(
        torch.equal(weights[name], value) for name, value in model.decoder.state_dict().items()
    )
    assert torch.equal(model.heads.unembeddings[0].weight, model.decoder.embedding)
    assert torch.equal(model.heads.norms[0].weight, model.decoder.norm.weight)


def test_anticausal_heads_stay_layers_of_the_model(prepared: Path, tmp_path: Path) -> None:
    shape = SHAPE.__class__(**vars(SHAPE) | {"layers": 4})
    heads = future_shape(shape, 3, "transformer", "anticausal", "shared")
    trainer = begin("future", link(prepared, tmp_path / "run"), shape=shape, heads=heads)
    trainer.objective.export(tmp_path / "model", "", {})
    initial = InitialModel.read(str(tmp_path / "model"))
    model = FutureModel(initial.config, initial.heads_for(3))  # type: ignore[arg-type]
    model.initialize(1, initial)
    expected = {
        name: value.bfloat16().float()
        for name, value in trainer.objective.module.state_dict().items()
    }
    found = model.state_dict()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    with pytest.raises(OptionError, match="future-tokens: expected 3 as in the checkpoint, or 1"):
        initial.heads_for(2)


def test_a_run_goes_on_only_from_the_same_checkpoint(
    teacher: Teacher, with_heads: Path, corpus: Path, tmp_path: Path
) -> None:
    run_command(command(teacher.folder, tmp_path / "run", corpus))
    assert "finished" in run_command(command(teacher.folder, tmp_path / "run", corpus))
    again = refusal(command(with_heads, tmp_path / "run", corpus, "--future-tokens 1"))
    assert "expected init = " in again


def test_an_untied_model_can_be_trained(checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    """The export has the output matrix; the trained one differs from the stored one."""
    folder = checkpoint("llama")
    initial = InitialModel.read(str(folder))
    assert not initial.config.tied
    model = LanguageModel.__new__(LanguageModel)
    model.initial = initial
    model.config = initial.config
    model.options = FUTURE
    model.module = model.build()
    with torch.no_grad():
        model.module.head.weight.add_(1.0)
    model.export(tmp_path / "out", "", {})
    stored, written = (load_file(each / "model.safetensors") for each in (folder, tmp_path / "out"))
    assert stored.keys() == written.keys()
    assert torch.equal(written["lm_head.weight"], (stored["lm_head.weight"].float() + 1).bfloat16())
    assert Tokenizer.load(tmp_path / "out").fingerprint == initial.tokenizer.fingerprint


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            "--hidden 32",
            "hidden: expected none with --init, whose model has it, found 32; leave it out",
        ),
        (
            "--bytes",
            "bytes: expected none with --init, whose model has it, found True; leave it out",
        ),
        (
            "--equal-parameters",
            (
                "equal-parameters: expected none with --init, whose model has it, found True; "
                "leave it out"
            ),
        ),
        (
            "--head-order causal",
            "head-order: expected none with --init, whose heads have it, found 'causal'",
        ),
        ("--future-tokens 99", "num-heads: expected an integer in 1..63, found 98"),
        ("--length 128", "length: expected an integer in 1..64, found 128"),
    ],
)
def test_mistakes_come_before_the_text(
    words: str, message: str, with_heads: Path, tmp_path: Path
) -> None:
    found = refusal(
        f"lm --init {with_heads} --source {tmp_path}=1 --out {tmp_path / 'run'} {words}"
    )
    assert found.startswith(message)
    assert not (tmp_path / "run").exists()


def test_models_that_the_export_cannot_describe_are_refused(
    checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    folder = checkpoint("qwen2")
    message = refusal(f"lm --init {folder} --source {tmp_path}=1 --out {tmp_path / 'run'}")
    assert message.startswith(
        f"init: expected a model of a Llama's kind, which the export can write; found {folder}"
    )
    assert "qkv_bias True instead of False" in message


def test_heads_of_another_model_are_refused(
    with_heads: Path, teacher: Teacher, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    for file in teacher.folder.iterdir():
        (folder / file.name).symlink_to(file)
    (folder / "heads").symlink_to(with_heads / "heads")
    with pytest.raises(OptionError, match="init: expected heads of the model itself"):
        InitialModel.read(str(folder))


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("tokens", "layers", "order"), [(2, 4, "parallel"), (3, 4, "parallel"), (4, 4, "causal")]
)
def test_equal_parameters(
    tokens: int, layers: int, order: str, corpus: Path, tmp_path: Path
) -> None:
    """A further head costs one layer, so that the weights differ by one norm per head."""
    sizes: dict[int, int] = {}
    common = (
        f"lm --source {corpus / 'stories.jsonl'}=1 --bytes --hidden 32 --layers {layers} --heads 2 "
        "--kv-heads 1"
    )
    for count in (1, tokens):
        out = tmp_path / str(count)
        more = (
            f"--future-tokens {count} --equal-parameters --head-order {order}" if count > 1 else ""
        )
        run_command(f"{common} --mlp 48 --positions 64 {PACE} --out {out} {more}")
        files = list((out / "export").rglob("model.safetensors"))
        sizes[count] = sum(value.numel() for file in files for value in load_file(file).values())
    assert sizes[tokens] == sizes[1] + (tokens - 1) * 32


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            "--equal-parameters",
            "equal-parameters: expected none without --future-tokens, found True; leave it out",
        ),
        (
            "--equal-parameters --future-tokens 3 --head-kind linear",
            (
                "equal-parameters: expected parallel or causal transformer heads, which add "
                "layers; "
                "found linear heads"
            ),
        ),
        (
            "--equal-parameters --future-tokens 3 --head-order anticausal",
            (
                "equal-parameters: expected parallel or causal transformer heads, which add "
                "layers; "
                "found anticausal heads"
            ),
        ),
        (
            "--equal-parameters --future-tokens 8",
            "layers: expected at least 9 to remove 7 with --equal-parameters, found 8",
        ),
    ],
)
def test_mistakes_about_equal_parameters(words: str, message: str, tmp_path: Path) -> None:
    assert refusal(f"lm {words} --source {tmp_path}=1 --out {tmp_path / 'run'}") == message
