"""Trained drafters of every kind: in composites, for several samples, and damaged folders."""

import json
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from drafting.drafting import LIKELY, assert_no_blocks, assert_plain, bound, decode
from drafting.from_draft.drafts import draft_folder
from lab.drafters import trained_glide, trained_kangaroo, trained_medusa, trained_multi_token
from pronk.base.errors import CheckpointError
from pronk.drafting import REGISTRY
from pronk.lab.drafters.modules import files as trained
from pronk.sampling.params import SamplingParams
from pronk.train.cli.main import app
from tiny_models import make_engine, run, samples, tiny_decoder

FOLDERS = {
    "kangaroo": trained_kangaroo.adapter_folder,
    "glide": trained_glide.glide_folder,
    "medusa": trained_medusa.medusa_folder,
    "multi_token": trained_multi_token.heads_folder,
}


def copy_of(kind: str, folder: Path) -> Path:
    return Path(shutil.copytree(FOLDERS[kind](), folder / kind))


def check_refused(kind: str, folder: Path, message: str) -> None:
    with pytest.raises(CheckpointError, match=message) as caught:
        bound(f"{kind}(model={str(folder)!r})")
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith(str(folder))
    assert str(caught.value).endswith("; train it again")


@pytest.mark.parametrize(
    ("kind", "spec"),
    [
        ("medusa", "first_of(prompt_lookup(min_ngram=1), {})"),
        ("medusa", "merged({}, recycling)"),
        ("medusa", "staged(DRAFT, {})"),
        ("multi_token", "cape(threshold({}))"),
        ("multi_token", "merged({}, recycling)"),
    ],
)
def test_inside_composite_drafters(kind: str, spec: str) -> None:
    """A trained drafter in ``first_of``, ``merged`` and wrappers, and as the smaller drafter of
    ``staged``.
    """
    spec = spec.replace("DRAFT", f"draft_model(model={draft_folder()!r})").format(
        f"{kind}(model={FOLDERS[kind]()!r})"
    )
    engine = make_engine(tiny_decoder())
    prompts = [[1, 2, 3], [5] * 20, [9, 8, 7, 9, 8, 7, 9, 8]]
    requests = decode(
        engine, bound(spec, engine), prompts, max_tokens=60, temperature=0.7, logit_bias=LIKELY
    )
    sources = [source for request in requests for source in request.stats.sources.items()]
    own = [each for name, each in sources if name.startswith(kind) or "staged(" in spec]
    assert sum(each.accepted for each in own) > (10 if kind == "multi_token" else 0)


@pytest.mark.few(3)
@pytest.mark.parametrize("windows", [(None, None), (24, 24)], ids=["all", "window"])
@pytest.mark.parametrize("kind", FOLDERS)
def test_samples_of_one_prompt(kind: str, windows: tuple[int | None, ...]) -> None:
    engine = make_engine(tiny_decoder(windows=windows))
    drafter = bound(f"{kind}(model={FOLDERS[kind]()!r})", engine)
    params = SamplingParams(n=4, max_tokens=24, temperature=0.8, seed=5, logit_bias=LIKELY)
    for prompt in ([1, 2, 3], [*range(45)]):
        requests = samples(prompt, params, drafter)
        run(engine, requests)
        assert_plain(engine, requests)
        assert len({tuple(request.output) for request in requests}) == 4
        assert sum(request.stats.accepted for request in requests) > 0
    if kind != "medusa":  # which has no cache
        assert_no_blocks(drafter)


@pytest.mark.parametrize(
    ("kind", "changed", "message"),
    [
        (
            "kangaroo",
            {"exit_layer": 9},
            r"drafter\.json: exit.layer: expected 1 to 1 for a target of 2 layers, found",
        ),
        (
            "glide",
            {"layers": 9},
            r"drafter\.json: layers: expected 1 to 2 for a target of 2 layers, found 9",
        ),
        (
            "multi_token",
            {"layer": 9},
            r"drafter\.json: layer: expected 1 to 2, the target's layers, found 9",
        ),
        (
            "multi_token",
            {"kind": "rnn"},
            r"drafter\.json: kind: expected one of transformer, linear, found 'rnn'",
        ),
        ("medusa", {"blocks": 9}, r"drafter\.json: blocks: expected an integer in 1..8, found 9"),
        (
            "medusa",
            {"tree": [[0, 1]]},
            r"drafter\.json: medusa: tree: expected each path once .* found \(0, 1\) without",
        ),
        ("medusa", {"tree": []}, r"drafter\.json: medusa: tree: expected 1\.\.1023 paths of ranks"),
        (
            "medusa",
            {"num_heads": 4},
            r"tensor layers\.3\.blocks\.0\.weight: expected shape \(64, 64\), found None",
        ),
    ],
)
def test_invalid_shapes_are_refused(
    kind: str, changed: dict[str, Any], message: str, tmp_path: Path
) -> None:
    folder = copy_of(kind, tmp_path)
    file = folder / "drafter.json"
    document = json.loads(file.read_text())
    file.write_text(json.dumps(document | {"shape": document["shape"] | changed}))
    check_refused(kind, folder, message)


@pytest.mark.parametrize("kind", FOLDERS)
def test_truncated_weights_are_refused(kind: str, tmp_path: Path) -> None:
    folder = copy_of(kind, tmp_path)
    bound(f"{kind}(model={str(folder)!r})")
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-10])
    check_refused(
        kind, folder, "expected a complete safetensors file, found a truncated or damaged one"
    )


def test_commands_in_errors_exist() -> None:
    commands = get_command(app).commands  # type: ignore[attr-defined]
    kinds = {*trained._TRAIN_ARGUMENTS, *FOLDERS}
    assert kinds <= REGISTRY.keys()
    for kind in kinds:
        command, *options = shlex.split(trained._TRAIN_ARGUMENTS.get(kind, kind))
        assert {*options, "--target"} <= {
            name for each in commands[command].params for name in each.opts
        }
