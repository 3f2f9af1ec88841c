"""An inflated drafter says beside the inflated target what the original says beside the source."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from checkpoints import MakeCheckpoint, randomize
from oracle import DenseAttend
from pronk import LLM, SamplingParams
from pronk.architecture.config import ModelConfig
from pronk.architecture.rope import apply_rope
from pronk.cli import inflate as cli_inflate
from pronk.drafters.from_target.modules.files import FORMAT, Trained
from pronk.drafters.from_target.modules.glide import GlideModule, GlideShape
from pronk.drafters.from_target.modules.heads import HeadsShape, MultiTokenHeads
from pronk.drafters.from_target.modules.kangaroo import KangarooAdapter, KangarooShape
from pronk.drafters.from_target.modules.medusa import MedusaHeads, MedusaShape
from pronk.errors import CheckpointError, OptionError, PronkError
from pronk.inflate.checkpoint import Shape, add_drafters, inflate
from pronk.models.clone_models import default_model
from pronk.models.decoder import Decoder
from pronk.models.fingerprint import Fingerprint
from pronk.models.loader import load_decoder, read_config
from tiny_models import make_cache

TOKENS = torch.randperm(300, generator=torch.Generator().manual_seed(7))[:40]
ROWS = len(TOKENS)
# The source has 48 dimensions, 3 layers, 80 MLP units, 6 heads over 2 key/value heads. Its layers are 1, 3 and 5 of 5.
EXACT, ROUNDED = Shape(192, 5, 112), Shape(84, 5, 112, 12, 6)
TREE = ((0,), (1,), (0, 0), (1, 0))
_KIND: dict[type[Any], tuple[str, type[nn.Module]]] = {
    HeadsShape: ("multi_token", MultiTokenHeads),
    MedusaShape: ("medusa", MedusaHeads),
    KangarooShape: ("kangaroo", KangarooAdapter),
    GlideShape: ("glide", GlideModule),
}
GLIDE = GlideShape(hidden=32, heads=4, kv_heads=2, mlp=48)


@dataclass(frozen=True)
class Case:
    name: str
    shape: Any
    family: str = "llama"
    overrides: dict[str, Any] = field(default_factory=dict)


BIASES = {"attention_bias": True, "mlp_bias": True}
CASES = [
    Case("heads of a layer", HeadsShape(2, layer=3, mlp=24)),
    Case("heads in the middle", HeadsShape(3, layer=2, mlp=24, order="causal"), overrides=BIASES),
    Case("heads with unembeddings", HeadsShape(2, 2, 24, order="anticausal", unembeddings="replicated")),
    Case("linear heads", HeadsShape(2, layer=1, kind="linear")),
    Case("heads", HeadsShape(2, 2, 24), "qwen3", {"rms_norm_eps": 0.3, "attention_bias": True}),
    Case("heads", HeadsShape(2, 2, 24), "qwen2"),
    Case("heads", HeadsShape(2, 2, 24), "mistral", {"sliding_window": 8}),
    Case("medusa", MedusaShape(3, 2, tree=TREE)),
    Case("medusa with unembeddings", MedusaShape(2, 1, "replicated", tree=TREE)),
    Case("kangaroo", KangarooShape(1, "attention", 6, 80)),
    Case("kangaroo with few heads", KangarooShape(2, "attention", 4, 80), overrides=BIASES),
    Case("kangaroo with a head", KangarooShape(2, "head", 6, 80)),
    Case("kangaroo of a layer", KangarooShape(1, "transformer", 6, 40), overrides=BIASES),
    Case("kangaroo without attention", KangarooShape(2, "mlp")),
    Case("kangaroo", KangarooShape(1, "transformer", 6, 80), "qwen3", {"rms_norm_eps": 0.3}),
    Case("glide", GLIDE),
    Case("glide in the middle", GlideShape(hidden=32, heads=4, kv_heads=2, mlp=48, cache_layer=2)),
    Case("glide", GLIDE, "qwen3", {"head_dim": 16}),
    Case("glide", GLIDE, "mistral", {"sliding_window": 8}),
    Case("vanilla", GlideShape(2, 32, 4, 2, 48, cross=False)),
]


def kind_of(shape: Any) -> tuple[str, type[nn.Module]]:
    name, module = _KIND[type(shape)]
    return ("vanilla" if isinstance(shape, GlideShape) and not shape.cross else name), module


def write_drafter(
    folder: Path, shape: Any, source: Path, dtype: torch.dtype = torch.float32, **facts: Any
) -> tuple[Path, nn.Module]:
    """A drafter of random weights for ``source``."""
    name, made = kind_of(shape)
    module = made(shape, read_config(source))
    randomize(module, seed=5)
    folder.mkdir()
    tensors = {key: value.detach().to(dtype) for key, value in module.state_dict().items()}
    save_file(tensors, folder / "model.safetensors")
    target = {"name": "tiny", **asdict(Fingerprint.of(source))}
    document = {"format": FORMAT, "kind": name, "shape": asdict(shape), "target": target, **facts}
    (folder / "drafter.json").write_text(json.dumps(document))
    return folder, module


def our_decoder(folder: Path) -> Decoder:
    config, device = read_config(folder), torch.device("cpu")
    return load_decoder(folder, config, dtype=torch.float32, device=device)


class Recording(DenseAttend):
    """Keeps the keys and values of every layer."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.seen: dict[int, tuple[Tensor, Tensor]] = {}

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self.seen[layer] = k, v
        return super().__call__(layer, q, k, v)


class Crossing(DenseAttend):
    """Looks into a target's cache as well, where row ``j`` sees the tokens before it."""

    def __init__(self, module: GlideModule, target: Decoder, cache: dict[int, tuple[Tensor, Tensor]]) -> None:
        super().__init__(module.config)
        self.module, self.target, self.cache = module, target, cache

    def cross(self, layer: int, q: Tensor) -> Tensor:
        c, number = self.target.config, self.module.cache_layers[layer] - 1
        keys, values = self.cache[number]
        span = c.windows[number]
        q = apply_rope(q, *rotations(self.target))
        out = torch.zeros(ROWS, c.num_heads, c.head_dim)
        for row in range(1, ROWS):
            old = slice(0 if span is None else max(0, row - span + 1), row)
            for head in range(c.num_heads):
                k, v = keys[old, head // c.group], values[old, head // c.group]
                out[row, head] = (k @ q[row, head] * c.head_dim**-0.5).softmax(0) @ v
        return out.flatten(1)


def rotations(decoder: Decoder) -> tuple[Tensor, Tensor]:
    positions = torch.arange(ROWS)
    rope = decoder.rope(positions, torch.full_like(positions, ROWS), torch.float32)
    assert rope is not None
    return rope


@torch.no_grad()
def said(model: Path, folder: Path) -> Tensor:
    """Logits ``[draft_tokens, tokens, vocab]`` of the drafter of ``folder`` beside the target ``model``, without caches."""
    decoder, trained = our_decoder(model), Trained.read(folder)
    plain = make_cache(decoder.config, torch.float32, num_blocks=1, packed=False)
    (shape_type,) = (each for each, (name, _) in _KIND.items() if name == trained.kind.replace("vanilla", "glide"))
    shape = trained.make(shape_type)
    module = trained.load(kind_of(shape)[1](shape, decoder.config), plain)
    attend, rope = Recording(decoder.config), rotations(decoder)
    x = decoder.embed(TOKENS, torch.arange(ROWS), torch.float32)
    hidden = dict(decoder.run(x, rope, attend))
    if isinstance(module, MultiTokenHeads):
        part, dense = module.part, DenseAttend(module.config)
        made = dict(module.run(hidden[shape.layer], lambda i, x: part(i, x, rope, dense), shape.num_heads))
        heads = [module.unembedding(i, decoder.head)(module.norm(i, out)) for i, out in sorted(made.items())]
        return torch.stack(heads)
    if isinstance(module, MedusaHeads):
        return module.logits(decoder.norm(hidden[decoder.config.num_layers]), decoder.head)
    if isinstance(module, KangarooAdapter):
        out = module(hidden[shape.exit_layer], rope, DenseAttend(module.config))
        return (module.head or decoder.head)(out)[None]
    assert isinstance(module, GlideModule)
    module.tie()
    x = module.embed(TOKENS, torch.arange(ROWS), torch.float32)
    *_, (_, last) = module.run(x, rotations(module), Crossing(module, decoder, attend.seen))
    return module.logits(last)[None]


def inflated(
    case: Case, size: Shape, checkpoint: MakeCheckpoint, tmp_path: Path, dtype: torch.dtype = torch.float32
) -> tuple[Path, Path, Path, Path]:
    """Source, its drafter, the large target, its drafter."""
    source, big = checkpoint(case.family, **case.overrides), tmp_path / "big"
    drafter, _ = write_drafter(tmp_path / "draft", case.shape, source, dtype)
    inflate(source, big, size, drafters=[drafter])
    return source, drafter, big, big / "drafters" / "draft"


@pytest.mark.parametrize("size", [EXACT, ROUNDED], ids=["exact", "rounded"])
@pytest.mark.parametrize("case", CASES, ids=[f"{case.family}: {case.name}" for case in CASES])
def test_same_guesses(case: Case, size: Shape, checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    source, drafter, big, large = inflated(case, size, checkpoint, tmp_path)
    expected = said(source, drafter)
    assert expected.std() > 0.3, "logits too flat to show anything"
    assert (said(big, large) - expected).abs().max() < 2e-4 * expected.std()
    assert Trained.read(large).target == Fingerprint.of(big)


@pytest.mark.parametrize(
    "shape",
    [
        HeadsShape(2, 2, 24, unembeddings="replicated"),
        HeadsShape(2, 2, kind="linear"),
        MedusaShape(2, 2, "replicated", tree=TREE),
        KangarooShape(1, "transformer", 6, 80),
        KangarooShape(2, "head", 6),
        KangarooShape(2, "mlp"),
        GLIDE,
    ],
    ids=lambda shape: f"{kind_of(shape)[0]} {getattr(shape, 'adapter', getattr(shape, 'kind', ''))}",
)
def test_all_that_is_there_works(shape: Any, checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    """Each tensor moves the logits; so does what was added, as soon as its way out is not zero."""
    _, _, big, large = inflated(Case("", shape, overrides=BIASES), ROUNDED, checkpoint, tmp_path)
    before = said(big, large)
    tensors = load_file(large / "model.safetensors")
    for name, tensor in tensors.items():
        changed = tensor.clone()
        changed[: 20 if tensor.dim() > 1 else None] *= -1.5  # not all: norms would forget that
        save_file(tensors | {name: changed}, large / "model.safetensors")
        assert (said(big, large) - before).abs().max() > 1e-3, name
    for name, tensor in tensors.items():
        if name.endswith(("out.weight", "down.weight", "cross_out.weight")) and (tensor == 0).any():
            changed = torch.where(tensor == 0, torch.randn(tensor.shape), tensor)
            changed[48 if len(tensor) == 84 else len(tensor) :] = 0.0
            save_file(tensors | {name: changed}, large / "model.safetensors")
            assert (said(big, large) - before).abs().max() > 1e-3, name


@pytest.mark.parametrize("case", [case for case in CASES if case.family == "llama"], ids=lambda case: case.name)
def test_a_power_of_four_is_exact_in_16_bits(case: Case, checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    _, drafter, _, large = inflated(case, EXACT, checkpoint, tmp_path, torch.bfloat16)
    small, big = (load_file(folder / "model.safetensors") for folder in (drafter, large))
    assert small.keys() == big.keys()
    for name, tensor in big.items():
        assert tensor.dtype == torch.bfloat16
        gain = "norm" in name and not isinstance(case.shape, GlideShape)
        values = small[name] / 2 if gain else small[name]
        assert {*values.flatten().tolist()} <= {*tensor.flatten().tolist()}, name
    assert "None of the original's weights is rounded." in (large / "README.md").read_text()


def test_gains_and_norms_in_16_bits(checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    case = Case("", HeadsShape(2, 2, 24), "qwen3", {"save_dtype": torch.bfloat16})
    source, drafter, big, large = inflated(case, ROUNDED, checkpoint, tmp_path, torch.bfloat16)
    tensors = load_file(large / "model.safetensors")
    assert tensors["norms.1.weight"].dtype == tensors["layers.0.mlp_norm.weight"].dtype == torch.float32
    assert tensors["layers.0.qkv.weight"].dtype == torch.bfloat16
    assert (said(big, large) - said(source, drafter)).abs().max() < 0.02
    card = (large / "README.md").read_text()
    assert "16 bits rounds them" in card
    assert "0.57 times the original's epsilon" in card  # 48 / 84, over a factor of 1


def test_it_grows_as_the_target_does(checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    """Layers 1, 2, 3 become 1, 3, 5; widths and heads of its own follow the target's."""
    source = checkpoint("llama")
    shapes = {
        "a": HeadsShape(2, layer=2, mlp=24),
        "b": KangarooShape(2, "transformer", 4, 80),
        "c": GLIDE,
        "d": MedusaShape(2, tree=TREE, accuracies=((0.5, 0.25), (0.5, 0.25))),
        "e": HeadsShape(2, layer=3, kind="linear"),
    }
    drafters = [write_drafter(tmp_path / name, shape, source)[0] for name, shape in shapes.items()]
    info = inflate(source, tmp_path / "big", Shape(96, 5, 120, 12, 6), drafters=drafters)
    grown = [Trained.read(tmp_path / "big" / "drafters" / name).make(type(shape)) for name, shape in shapes.items()]
    assert grown == [
        HeadsShape(2, layer=3, mlp=36),
        KangarooShape(3, "transformer", 8, 120),
        GlideShape(hidden=32, heads=4, kv_heads=2, mlp=48, cache_layer=5),
        shapes["d"],
        HeadsShape(2, layer=5, kind="linear"),
    ]
    assert [each.name for each in info.drafters] == [*shapes]
    for each in info.drafters:
        tensors = load_file(tmp_path / "big" / "drafters" / each.name / "model.safetensors")
        assert each.parameters == sum(tensor.numel() for tensor in tensors.values()) > each.source_parameters


ALLOWED = range(20, 28)  # so few that guesses at random are right now and then
SPECS = {
    "multi_token": (HeadsShape(3, layer=2, mlp=24), ""),
    "medusa": (MedusaShape(2, 2, tree=TREE), ""),
    "kangaroo": (KangarooShape(1, "attention", 6, 80), ", num_tokens=4, eta=0"),
    "glide": (GLIDE, ", num_tokens=4"),
    "vanilla": (GlideShape(2, 32, 4, 2, 48, cross=False), ", num_tokens=4"),
}


@pytest.mark.parametrize("kind", SPECS)
def test_in_the_engine(kind: str, checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    shape, options = SPECS[kind]
    source, drafter, big, large = inflated(Case(kind, shape), ROUNDED, checkpoint, tmp_path)
    params = SamplingParams(max_tokens=60, logit_bias=dict.fromkeys(ALLOWED, 100.0), ignore_eos=True)
    done = []
    for model, folder in ((source, drafter), (big, large)):
        llm = LLM(model, dtype="float32", threads=1, budget="all", drafter=f"{kind}(model={str(folder)!r}{options})")
        out = llm.generate(["def add(a, b):", "The quick brown"], params)
        done.append([(each.token_ids, [(step.depth, step.accepted) for step in each.stats.steps]) for each in out])
    assert done[0] == done[1]
    steps = [step for _, each in done[0] for step in each]
    assert sum(drafted for drafted, _ in steps) > 20
    assert sum(accepted for _, accepted in steps) > 3


def test_files(checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    source, shape = checkpoint("llama"), MedusaShape(2, tree=TREE)
    figures = {"on-policy KL": 0.25}
    drafter, _ = write_drafter(tmp_path / "draft", shape, source, figures=figures, command="pronk train medusa")
    (drafter / "README.md").write_text("---\nlicense: mit\n---\n\n# draft\n\n## Figures\n")
    inflate(source, tmp_path / "big", ROUNDED, drafters=[drafter], name="owner/tiny", command="pronk inflate big")
    folder = tmp_path / "big" / "drafters" / "draft"
    facts, old = (json.loads((each / "drafter.json").read_text()) for each in (folder, drafter))
    assert facts["figures"] == figures
    assert facts["target"] == {"name": "big", **asdict(Fingerprint.of(tmp_path / "big"))}
    assert facts["inflated_from"] == old["target"]
    card = (folder / "README.md").read_text()
    assert card.startswith("---\nlicense: mit\n---\n\n# draft: inflated\n")
    assert "Same guesses as draft makes for owner/tiny, for big, which is owner/tiny at a simulated size" in card
    assert "```\npronk inflate big\n```\n\n# draft\n\n## Figures\n" in card
    assert "None of the original's weights is rounded." in card  # it has no norms


def test_later(checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    """Drafters that are added to a checkpoint are those that it would have been written with."""
    source, out = checkpoint("qwen2", tie_word_embeddings=True), tmp_path / "big"
    folders = [write_drafter(tmp_path / name, GLIDE, source)[0] for name in ("one", "two")]
    inflate(source, tmp_path / "with", ROUNDED, drafters=folders)
    inflate(source, out, ROUNDED)
    add_drafters(source, out, folders[:1])
    (info,) = add_drafters(source, out, folders[1:], Shape(84, num_heads=12), dtype="float32")
    assert info.name == "two"
    for name in ("one", "two"):
        later, together = (each / "drafters" / name for each in (out, tmp_path / "with"))
        assert (later / "model.safetensors").read_bytes() == (together / "model.safetensors").read_bytes()
        facts = [json.loads((each / "drafter.json").read_text()) for each in (later, together)]
        assert [each["target"].pop("name") for each in facts] == ["big", "with"]
        assert facts[0] == facts[1]
    assert not list((out / "drafters").glob("*.partial"))


def refuse(work: Callable[[], object], error: type[PronkError], expected: str) -> None:
    with pytest.raises(error, match=expected) as found:
        work()
    assert "\n" not in str(found.value)


def test_refused_drafters(checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    source, other, out = checkpoint("llama"), checkpoint("llama", seed=9), tmp_path / "out"
    good, stranger = (write_drafter(tmp_path / name, GLIDE, at)[0] for name, at in (("good", source), ("bad", other)))
    (tmp_path / "again").mkdir()
    twin, _ = write_drafter(tmp_path / "again" / "good", GLIDE, source)
    deep, _ = write_drafter(tmp_path / "deep", GlideShape(2, 32, 4, 2, 48), source)
    unknown, _ = write_drafter(tmp_path / "unknown", GLIDE, source, kind="crystal_ball")

    def write(*drafters: Path) -> Callable[[], object]:
        return lambda: inflate(source, out, ROUNDED, drafters=drafters)

    own, its = Fingerprint.of(source).weights, Fingerprint.of(other).weights
    refuse(write(stranger), OptionError, f"weights {own}.*bad, which was trained on another target .*weights {its}")
    refuse(write(source), CheckpointError, "expected a folder that pronk train has written, with drafter.json")
    refuse(write(tmp_path / "nowhere"), CheckpointError, "expected a folder that pronk train has written")
    refuse(write(unknown), OptionError, "expected one of multi_token, medusa, .* found crystal_ball")
    refuse(write(good, twin), OptionError, "expected folders of different names, found good twice")
    refuse(write(deep), OptionError, "GLIDE drafter of one layer for 5 layers of the target, found 2, .* layers 3, 5,")
    save_file({"embedding": torch.ones(3)}, good / "model.safetensors")
    refuse(write(good), CheckpointError, "tensor .*expected shape")
    assert not out.exists()
    inflate(source, out, Shape(84, intermediate_size=112), drafters=[deep])  # all layers are real
    assert (out / "drafters" / "deep" / "drafter.json").exists()


def test_refused_checkpoints(checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    source, other, out = checkpoint("llama"), checkpoint("llama", seed=9), tmp_path / "out"
    inflate(source, out, ROUNDED)
    good, _ = write_drafter(tmp_path / "good", GLIDE, source)
    stranger, _ = write_drafter(tmp_path / "bad", GLIDE, other)
    add = partial(add_drafters, source, out, [good])
    refuse(lambda: add(Shape(96)), OptionError, "hidden_size: expected 84, as .*out has, found 96")
    refuse(lambda: add(Shape(num_kv_heads=3)), OptionError, "num_kv_heads: expected 6,")
    refuse(lambda: add(dtype="float16"), OptionError, "dtype: expected float32, .* found float16")
    refuse(lambda: add_drafters(other, out, [stranger]), OptionError, "expected the weights of .*, found others")
    small = checkpoint("llama", num_hidden_layers=1)
    refuse(lambda: add_drafters(small, out, [good]), OptionError, "inflate has made of .* found that of llama")
    refuse(lambda: add_drafters(source, other, [good]), OptionError, "inflate has made of .* found another one")
    refuse(lambda: add_drafters(source, out, [stranger]), OptionError, "trained on another target")
    assert not (out / "drafters").exists()
    add()
    refuse(add, OptionError, r"out: expected a new or empty folder, found .*good in use")


def run(*arguments: str) -> None:
    app = typer.Typer(rich_markup_mode="rich")
    app.command()(cli_inflate.inflate)
    app(list(arguments), standalone_mode=False)


def test_command(checkpoint: MakeCheckpoint, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, out = checkpoint("llama"), tmp_path / "big"
    one, two = (str(write_drafter(tmp_path / name, GLIDE, source)[0]) for name in ("one", "two"))
    sizes = ("--hidden", "80", "--layers", "4", "--intermediate", "96")
    run(str(out), "--source", str(source), "--drafter", one, *sizes)
    expected = f"\npronk inflate big --source {source.name} --drafter one {' '.join(sizes)} --dtype auto --seed 0\n"
    assert expected in (out / "README.md").read_text()
    assert expected in (out / "drafters" / "one" / "README.md").read_text()
    assert "drafters/one: " in capsys.readouterr().err
    weights = (out / "model.safetensors").stat()
    run(str(out), "--source", str(source), "--drafter", two, "--layers", "4", "--seed", "3")
    expected = f"\npronk inflate big --source {source.name} --drafter two --layers 4 --dtype auto --seed 3\n"
    assert expected in (out / "drafters" / "two" / "README.md").read_text()
    assert "drafters/two: " in capsys.readouterr().err
    assert (out / "model.safetensors").stat().st_mtime_ns == weights.st_mtime_ns


def test_a_name_of_the_clone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli_inflate._drafter("pronk-tiny-glide") == default_model().parent / "pronk-tiny-glide"
    assert cli_inflate._drafter("others") == Path("others")
    (tmp_path / "pronk-tiny-glide").mkdir()
    assert cli_inflate._drafter("pronk-tiny-glide") == Path("pronk-tiny-glide")
