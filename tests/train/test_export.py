import json
from copy import deepcopy
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from pronk.models.families import parse_config
from pronk.train.attention import dense_logits
from pronk.train.card import model_card
from pronk.train.export import export_model
from pronk.train.lm import LanguageModel
from pronk.train.loop import Trainer

TOKENS = torch.randint(4, 320, (2, 40), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def exported(trained: Trainer[LanguageModel], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("exported") / "model"
    command = "pronk train lm --source code=1 --out run"
    card = model_card(
        trained, "little", {"figures": {"code": 1.25}, "length": 64, "command": command}
    )
    for _ in range(2):  # the second one replaces the first
        export_model(trained.objective.module, trained.folder / "data", folder, card)
    return folder


def test_transformers_computes_the_same_logits(
    trained: Trainer[LanguageModel], exported: Path
) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32)
    assert type(model).__name__ == "LlamaForCausalLM"
    rounded = deepcopy(trained.objective.module).bfloat16().float()
    with torch.no_grad():
        ours = dense_logits(rounded, TOKENS).view(2, 40, -1)
        theirs = model(TOKENS).logits
    torch.testing.assert_close(theirs, ours, rtol=0, atol=1e-4)


def test_files_agree(trained: Trainer[LanguageModel], exported: Path) -> None:
    from transformers import AutoTokenizer, GenerationConfig

    assert not exported.with_name("model.partial").exists()
    tensors = load_file(exported / "model.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    assert "lm_head.weight" not in tensors
    assert (
        parse_config(json.loads((exported / "config.json").read_text())) == trained.objective.config
    )
    generation = GenerationConfig.from_pretrained(exported)
    assert generation.eos_token_id == [0, 3]
    assert AutoTokenizer.from_pretrained(exported).chat_template


def test_card_says_where_the_model_comes_from(
    trained: Trainer[LanguageModel], exported: Path
) -> None:
    card = (exported / "README.md").read_text()
    for fact in (
        "# little",
        "3072 tokens in 12 steps of 256 tokens, seed 0",
        "on sequences of 64: code 1.250",
        "pronk train lm --source code=1 --out run",
        "| stories | owner/name@abc | MIT | 360 |",
        f"torch {torch.__version__}",
    ):
        assert fact in card
    assert str(trained.folder) not in card
