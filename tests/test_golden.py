"""The bits of tokens and log-probabilities are those of ``golden.json``, on every processor."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

import golden
import pronk
from covering import covering
from kernels.test_bits import find_compilers
from model_digests import digests
from pronk import reproducibility
from pronk.kernels.build import build
from pronk.kernels.library import candidates

ROOT = Path(__file__).parents[1]
# Models whose texts together use every function of exact_math: YaRN and llama3 tables, decays of
# recurrent layers, routers, block formats.
FEW = (
    "llama",
    "gpt_oss",
    "nemotron_h",
    "qwen3_5_text",
    "gemma4_text",
    "ministral3",
    "gptq-4",
    "Q4_K",
)
# Some formats are loaded with the warning that their weights are dequantized, or that activations
# are not quantized as the file says.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.* are dequantized to:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*static scales of activations:UserWarning"),
]

INSTRUCTION_SETS = [kernels.name for kernels in candidates()]


@pytest.mark.few(33)
@pytest.mark.parametrize("name", golden.MODELS)
def test_digests(name: str, tmp_path: Path) -> None:
    expected = reproducibility.current(golden.read()[name])
    assert digests(golden.MODELS[name](tmp_path / "model")) == expected


@pytest.mark.parametrize(("name", "kernels"), covering(FEW, INSTRUCTION_SETS[1:], strength=1))
def test_digests_on_other_instruction_sets(name: str, kernels: str, tmp_path: Path) -> None:
    expected = reproducibility.current(golden.read()[name])
    assert digests(golden.MODELS[name](tmp_path / "model"), kernels) == expected


def run_golden(arguments: Sequence[str], **environment: str) -> None:
    """Compare digests in a process of its own.

    Args:
        arguments: arguments of ``golden.py``.
        environment: further environment variables.
    """
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests")])
    command = [sys.executable, str(ROOT / "tests" / "golden.py"), *arguments]
    own = os.environ | {"PYTHONPATH": path} | environment
    process = subprocess.run(command, env=own, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stdout + process.stderr


@pytest.mark.long
@pytest.mark.slow  # test_exact_bits.py checks each function
def test_digests_without_numpys_own_instruction_sets() -> None:
    numpy = np._core._multiarray_umath  # type: ignore[attr-defined]
    used = [name for name in numpy.__cpu_dispatch__ if numpy.__cpu_features__[name]]
    if not used:
        pytest.skip("NumPy has no functions for this processor's instruction sets")
    run_golden([*FEW], NPY_DISABLE_CPU_FEATURES=" ".join(used))


@pytest.mark.slow
@pytest.mark.parametrize("compiler", find_compilers(), ids=lambda command: command[0])
def test_digests_of_a_compilers_build(compiler: list[str], tmp_path: Path) -> None:
    """``test_bits.py`` compares each instruction set of these builds."""
    library = tmp_path / "libpronk.so"
    build(library, compiler, extra=["-O3"], native=True)
    run_golden(["--library", str(library)])


def test_every_model_has_digests() -> None:
    recorded = golden.read()
    assert recorded.keys() == golden.MODELS.keys()
    for name, history in recorded.items():
        found = reproducibility.current(history)
        assert found.keys() == {"text", *reproducibility.PARAMS}, name
        # a sampled text that is the greedy text would hide the noise
        assert len({*found.values()}) == len(found), name


def test_each_version_of_the_bits_has_a_line_in_the_changelog() -> None:
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    versions = {int(bits) for history in golden.read().values() for bits in history}
    assert max(versions) <= pronk.BITS
    for bits in range(1, pronk.BITS + 1):
        assert f"`pronk.BITS` is {bits}:" in changelog, f"say what changed with {bits}"


def test_a_digest_changes_only_with_another_version() -> None:
    old = {"text": "a"}
    new = {"text": "b"}
    recorded = {"llama": {"1": old}}
    golden.record(recorded, "llama", old, 1)
    with pytest.raises(ValueError, match=r"raise pronk\.BITS"):
        golden.record(recorded, "llama", new, 1)
    golden.record(recorded, "llama", old, 2)
    assert recorded == {"llama": {"1": old}}
    golden.record(recorded, "llama", new, 2)
    golden.record(recorded, "gemma", new, 2)
    assert recorded == {"llama": {"1": old, "2": new}, "gemma": {"2": new}}
    golden.record(recorded, "llama", {"text": "c"}, 2, unreleased=True)
    assert recorded["llama"] == {"1": old, "2": {"text": "c"}}


def test_older_versions_keep_their_digests(monkeypatch: pytest.MonkeyPatch) -> None:
    history = {"1": {"text": "a"}, "3": {"text": "b"}}
    for bits, expected in ((1, "a"), (2, "a"), (3, "b"), (4, "b")):
        monkeypatch.setattr(pronk, "BITS", bits)
        assert reproducibility.current(history) == {"text": expected}
