"""Whole programs on Arm, in an emulator: the digests and random requests of other processors.

``kernels/test_arm.py`` compares products. These tests run pronk in an arm64 Python, which ``make
arm`` downloads.
"""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

import golden
from emulated_arm import PROCESSORS, ROOT, install, run_python, why_no_programs
from equal_outputs import write_models
from pronk import reproducibility
from test_equal_machines import WIDEST, compare
from test_equal_machines import run as run_here
from test_golden import FEW

REASON = why_no_programs()
pytestmark = [
    pytest.mark.skipif(REASON is not None, reason=f"programs are NOT run on Arm here: {REASON}"),
    pytest.mark.filterwarnings("ignore:.* are dequantized to:UserWarning"),
]


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build pronk for Arm; -O1 takes a third of the time, and has the same bits."""
    folder = tmp_path_factory.mktemp("arm")
    install(folder, ["-O1", "-DPRONK_FEW_TILES"])
    return folder


@pytest.fixture(scope="module")
def released(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build pronk for Arm with the flags of the wheels."""
    folder = tmp_path_factory.mktemp("arm")
    install(folder)
    return folder


def check_digests(clone: Path, processor: str, names: Sequence[str], folder: Path) -> None:
    """Compare the digests of models with the recorded ones.

    Args:
        clone: folder of ``emulated_arm.install``.
        processor: a key of ``PROCESSORS``.
        names: names of models of ``golden``, which are written into ``folder``.
        folder: an empty folder.
    """
    models = {name: str(golden.MODELS[name](folder / name)) for name in names}
    program = str(ROOT / "tests" / "model_digests.py")
    found = json.loads(run_python(clone, processor, [program, *models.values()]))
    recorded = golden.read()
    different = [
        name
        for name, path in models.items()
        if found[path] != reproducibility.current(recorded[name])
    ]
    assert different == []


@pytest.mark.slow  # the kernels on Arm: kernels/test_arm.py
def test_digests(clone: Path, tmp_path: Path) -> None:
    check_digests(clone, "max", FEW, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("processor", PROCESSORS)
def test_digests_of_all_models(released: Path, processor: str, tmp_path: Path) -> None:
    check_digests(released, processor, [*golden.MODELS], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("processor", PROCESSORS)
def test_random_requests(released: Path, processor: str, tmp_path: Path) -> None:
    """Drafters, options, guides, LoRA and an int8 cache."""
    write_models(tmp_path)
    seed = 2
    count = 30
    program = str(ROOT / "tests" / "equal_outputs.py")
    arguments = [program, str(tmp_path), "auto", str(seed), str(count)]
    here = run_here(tmp_path, WIDEST, (), seed, count)
    on_arm = json.loads(run_python(released, processor, arguments))
    compare({WIDEST: here, processor: on_arm}, count)
