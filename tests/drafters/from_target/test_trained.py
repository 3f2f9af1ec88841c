"""Folders of trained drafters that are damaged, and what their errors say to do."""

import json
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from drafters.drafting import bound, decode
from drafters.from_draft.drafts import draft_folder
from drafters.from_target import trained_glide, trained_kangaroo, trained_medusa, trained_multi_token
from pronk.cli.train.main import app
from pronk.drafters import REGISTRY
from pronk.drafters.from_target.modules import files as trained
from pronk.errors import CheckpointError
from tiny_models import make_engine, tiny_decoder

FOLDERS = {
    "kangaroo": trained_kangaroo.adapter_folder,
    "glide": trained_glide.glide_folder,
    "medusa": trained_medusa.medusa_folder,
    "multi_token": trained_multi_token.heads_folder,
}


def copied(kind: str, folder: Path) -> Path:
    return Path(shutil.copytree(FOLDERS[kind](), folder / kind))


def refused(kind: str, folder: Path, message: str) -> None:
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
def test_in_company(kind: str, spec: str) -> None:
    """Within and beside others, and as the smaller drafter of a draft model; the text is that of plain decoding."""
    spec = spec.replace("DRAFT", f"draft_model(model={draft_folder()!r})").format(f"{kind}(model={FOLDERS[kind]()!r})")
    engine = make_engine(tiny_decoder())
    prompts = [[1, 2, 3], [5] * 20, [9, 8, 7, 9, 8, 7, 9, 8]]
    likely = dict.fromkeys(range(5), 30.0)  # few tokens are likely, so that some guesses are right
    requests = decode(engine, bound(spec, engine), prompts, max_tokens=60, temperature=0.7, logit_bias=likely)
    sources = [source for request in requests for source in request.stats.sources.items()]
    own = [each for name, each in sources if name.startswith(kind) or "staged(" in spec]
    assert sum(each.accepted for each in own) > (10 if kind == "multi_token" else 0)


@pytest.mark.parametrize(
    ("kind", "changed", "message"),
    [
        ("kangaroo", {"exit_layer": 9}, r"exit.layer: expected 1 to 1 for a target of 2 layers, found 9"),
        ("glide", {"layers": 9}, "layers: expected 1 to 2 for a target of 2 layers, found 9"),
        ("multi_token", {"layer": 9}, "layer: expected 1 to 2, the target's layers, found 9"),
        ("medusa", {"blocks": 9}, "blocks: expected 1 to 8, found 9"),
        ("multi_token", {"kind": "rnn"}, "kind: expected one of transformer, linear, found 'rnn'"),
    ],
)
def test_a_shape_that_does_not_go_with_the_target(
    kind: str, changed: dict[str, Any], message: str, tmp_path: Path
) -> None:
    folder = copied(kind, tmp_path)
    file = folder / "drafter.json"
    document = json.loads(file.read_text())
    file.write_text(json.dumps(document | {"shape": document["shape"] | changed}))
    refused(kind, folder, rf"drafter\.json: {message}")


@pytest.mark.parametrize("kind", FOLDERS)
def test_weights_that_are_cut_off(kind: str, tmp_path: Path) -> None:
    folder = copied(kind, tmp_path)
    bound(f"{kind}(model={str(folder)!r})")
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-10])
    refused(kind, folder, "expected a complete safetensors file, found a truncated or damaged one")


def test_every_command_that_an_error_names_is_there() -> None:
    commands = get_command(app).commands  # type: ignore[attr-defined]
    kinds = {*trained._COMMANDS, *FOLDERS}
    assert kinds <= REGISTRY.keys()
    for kind in kinds:
        command, *options = shlex.split(trained._COMMANDS.get(kind, kind))
        assert {*options, "--target"} <= {name for each in commands[command].params for name in each.opts}
