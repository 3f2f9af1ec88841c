"""Packages of others add devices, drafters and commands; a missing or broken one is an error of
one line.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

import pronk
from engine_copy import GUESTS
from pronk import LLM, OptionError, SamplingParams
from pronk.base.guests import guests, load_guest
from pronk.checkpoint.hub.clone_models import clone_model
from pronk.cli.main import main
from pronk.drafting import REGISTRY, make_drafter
from waiting import HUNG

# A function that installs a package ``stranger``: its code, and its entry points by group and name.
Install = Callable[[str, Mapping[str, str]], None]

DRAFTER = """
from pronk import PromptLookup

class Eager(PromptLookup):
    name = "eager"
"""
FAULTY = """
from dataclasses import dataclass
from typing import Annotated
from pronk import Drafter
from pronk.base import Option

@dataclass(frozen=True)
class Faulty(Drafter):
    name = "faulty"
    model: str
    num_tokens: Annotated[int, Option("Number of draft tokens.", low=1, high=64)] = 4

    def bind(self, target):
        raise LookupError(self.model)
"""
COMMAND = """
from typing import Annotated
import typer
from pronk.base.guests import Command

HELLO = Command("stranger:hello", "Greet.")

def hello(name: str, loud: Annotated[bool, typer.Option("--loud")] = False) -> None:
    \"\"\"Greet.\"\"\"
    typer.echo(f"Hello {name.upper() if loud else name}")
"""


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Yield a function that installs a package; it is uninstalled after the test."""
    known = {*sys.modules}

    def add(code: str, entry_points: Mapping[str, str]) -> None:
        (tmp_path / "stranger.py").write_text(code, encoding="utf-8")
        folder = tmp_path / "stranger-1.0.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(
            "Metadata-Version: 2.1\nName: stranger\nVersion: 1.0\n", encoding="utf-8"
        )
        lines = [f"[{group}]\n{entry}\n" for group, entry in entry_points.items()]
        (folder / "entry_points.txt").write_text("\n".join(lines), encoding="utf-8")
        monkeypatch.syspath_prepend(tmp_path)
        guests.cache_clear()

    yield add
    for name in {*sys.modules} - known:
        if name.startswith("stranger"):
            del sys.modules[name]
    guests.cache_clear()


ABACUS = """
from pronk.backends import ModelRunner, PagedCache

class Runner(ModelRunner):
    passes = 0

    def forward(self, batch, collect=frozenset()):
        Runner.passes += 1
        return super().forward(batch, collect)

class Abacus:
    split = None
    pool = PagedCache
    memory = 2**24  # free bytes, of which the KV cache takes a quarter

    def __init__(self, device, config):
        self.device = device
        self.shard_config = config

    def make_runner(self, decoder, cache):
        return Runner(decoder, cache)

    def end(self):
        pass

def open_device(options, model, dtype, config, kernels):
    return Abacus(options.device, config)
"""


def test_a_device(install: Install) -> None:
    """Its runner computes the passes of the target, and its memory holds the KV cache."""
    install(ABACUS, {"pronk.devices": "abacus = stranger:open_device"})
    params = SamplingParams(max_tokens=24)
    expected = LLM(drafter="suffix").generate("def f(a): return", params)
    llm = LLM(device="abacus:1", drafter="suffix")
    assert llm.device == "abacus:1"
    assert 2**20 < sum(pool.nbytes for pool in llm.engine.cache._pools) < 2**22 + 2**16
    assert llm.generate("def f(a): return", params).token_ids == expected.token_ids
    assert sys.modules["stranger"].Runner.passes > 0
    with pytest.raises(
        OptionError, match=r"^device: expected one of cpu, .*abacus.*, found 'abacu'"
    ):
        LLM(device="abacu")


def test_a_device_that_no_package_adds(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["generate", "--device", "metal", "x"])
    assert (
        capsys.readouterr().err
        == "pronk: error: device: expected one of cpu, cuda, found 'metal'\n"
    )


def test_a_drafter_is_available_everywhere(install: Install) -> None:
    install(DRAFTER, {"pronk.drafters": "eager = stranger:Eager"})
    assert type(make_drafter("eager(num_tokens=3)")) is REGISTRY["eager"] is pronk.Eager
    assert {"Eager"} <= {*pronk.__all__} & {*dir(pronk)}
    llm = LLM("pronk-tiny", budget="all")
    params = SamplingParams(max_tokens=24)
    plain = llm.generate("a = 1\nb = 1\n", params, drafter="autoregressive")
    found = llm.generate("a = 1\nb = 1\n", params, drafter="eager(min_ngram=1)")
    assert found.token_ids == plain.token_ids
    assert found.stats.accepted > 0
    with pytest.raises(OptionError, match=r"expected one of .*eager"):
        make_drafter("eagre")


@pytest.mark.parametrize(
    ("drafter", "message"),
    [
        ("faulty", "drafter: faulty: expected model=…, found none; write faulty(model=…)"),
        (
            "faulty(model='m', num_tokens='a')",
            "faulty: num_tokens: expected an integer in 1..64, found 'a'",
        ),
        (
            "suffix, faulty(model='m', num_tokens=-3)",
            "faulty: num_tokens: expected an integer in 1..64, found -3",
        ),
        (
            "faulty(model='m')",
            "drafter faulty: expected bind() to return a Proposer, found LookupError: m; correct it",
        ),
        (
            "suffix, faulty(model='m')",
            "drafter faulty: expected bind() to return a Proposer, found LookupError: m; correct it",
        ),
    ],
)
def test_a_faulty_drafter_is_an_error_of_one_line(
    drafter: str, message: str, install: Install, capsys: pytest.CaptureFixture[str]
) -> None:
    install(FAULTY, {"pronk.drafters": "faulty = stranger:Faulty"})
    spec = f"first_of({drafter})" if "suffix" in drafter else drafter
    with pytest.raises(SystemExit, match="2"):
        main(["generate", "a", "--model", "pronk-tiny", "--drafter", spec])
    assert capsys.readouterr().err.splitlines()[-1] == f"pronk: error: {message}"


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (
            "hasty = stranger:Eager",
            (
                "drafter: hasty: expected Eager.name to equal its entry point, found 'eager'; write "
                "name = 'hasty' in the class"
            ),
        ),
        (
            "eager = stranger:make",
            (
                "drafter: eager: expected its entry point to name a subclass of pronk.Drafter, found "
                "<function make"
            ),
        ),
        (
            "eager = stranger:Lazy",
            (
                "drafter: eager: expected its entry point to name a subclass of pronk.Drafter, found "
                "Lazy; correct it in pyproject.toml and install the package again"
            ),
        ),
    ],
)
def test_an_entry_point_names_a_drafter_of_its_name(
    entry: str, message: str, install: Install
) -> None:
    code = f"{DRAFTER}\ndef make():\n    return Eager()\n\nclass Lazy:\n    pass\n"
    install(code, {"pronk.drafters": entry})
    with pytest.raises(OptionError) as error:
        make_drafter(entry.partition(" ")[0])
    assert str(error.value).startswith(message)


def test_a_command(install: Install, capsys: pytest.CaptureFixture[str]) -> None:
    install(COMMAND, {"pronk.commands": "hello = stranger:HELLO"})
    for arguments, text in ((["--help"], "Greet."), (["hello", "you", "--loud"], "Hello YOU\n")):
        with pytest.raises(SystemExit, match="0"):
            main(arguments)
        assert text in capsys.readouterr().out


BROKEN = {
    "missing": (
        "",
        "lost_package:Lost",
        "expected lost_package, found none; install lost_package again",
    ),
    "lacks an extra": (
        "import lost_library",
        "stranger:Lost [serve]",
        "expected lost_library, found none; run pip install '.[serve]' in a clone of pronk",
    ),
    "broken": (
        "raise ImportError('libcuda.so: not found')",
        "stranger:Lost",
        (
            "expected stranger that can be imported, found 'libcuda.so: not found'; "
            "install stranger again"
        ),
    ),
}


@pytest.mark.parametrize(("code", "home", "message"), BROKEN.values(), ids=BROKEN)
def test_a_guest_that_cannot_be_imported(
    code: str, home: str, message: str, install: Install, capsys: pytest.CaptureFixture[str]
) -> None:
    groups = ("pronk.devices", "pronk.drafters", "pronk.commands")
    install(code, dict.fromkeys(groups, f"lost = {home}"))
    with pytest.raises(OptionError) as error:
        load_guest("pronk.devices", "lost", "device")
    assert str(error.value) == f"device: {message}"
    for use in (lambda: make_drafter("lost"), lambda: pronk.Lost):
        with pytest.raises(OptionError) as error:
            use()
        assert str(error.value) == f"drafter: lost: {message}"
    with pytest.raises(SystemExit, match="2"):
        main(["lost", "--option"])
    assert capsys.readouterr().err == f"pronk: error: lost: {message}\n"


def test_an_unregistered_guest() -> None:
    with pytest.raises(OptionError) as error:
        load_guest("pronk.devices", "abacus", "device")
    found = (
        "expected a package that registers abacus in pronk.devices, found none; install pronk again"
    )
    assert str(error.value) == f"device: {found}"


# Generates with every drafter of the engine, and prints what it says of the guests that are
# missing.
ALONE = """
import importlib, pkgutil, sys
import pronk
from pronk import LLM, Guide, SamplingParams
from pronk.cli.main import main
from pronk.drafting.registry import DRAFTERS

for module in pkgutil.walk_packages(pronk.__path__, "pronk."):
    if not module.name.endswith(("__main__", ".libpronk", ".libpronk_suffix")):
        importlib.import_module(module.name)
llm = LLM(MODEL, threads=1, budget="all")
guide = Guide(regex="[a-z ]{8,20}")
for params in (SamplingParams(max_tokens=12), SamplingParams(max_tokens=12, temperature=0.8, seed=3, guide=guide)):
    plain = llm.generate("a = 1; b = 1; a =", params, drafter="autoregressive").token_ids
    for name in DRAFTERS:
        if name not in ("eagle3", "mtp", "gemma4_assistant", "draft_model", "threshold"):  # no model for them comes with this one
            assert llm.generate("a = 1; b = 1; a =", params, drafter=name).token_ids == plain, name
for use in (
    lambda: pronk.Kangaroo,
    lambda: LLM(MODEL, drafter="lookahead"),
    lambda: LLM(MODEL, workers=2),
):
    try:
        use()
    except pronk.PronkError as error:
        print(error, flush=True)
for command in ("serve", "train", "bench"):
    try:
        main([command])
    except SystemExit as stop:
        assert stop.code == 2
"""


@pytest.mark.long
def test_the_engine_runs_without_its_guests(tmp_path: Path) -> None:
    """In a copy without the folders of the guests, a line says what is missing, and all else
    works.
    """
    source = Path(pronk.__file__).parent
    left_out = shutil.ignore_patterns("__pycache__")
    shutil.copytree(source, tmp_path / "pronk", ignore=left_out)
    for guest in GUESTS:
        shutil.rmtree(tmp_path / "pronk" / guest)
    command = [
        sys.executable,
        "-W",
        "error",
        "-c",
        f"MODEL = {str(clone_model('pronk-tiny'))!r}\n{ALONE}",
    ]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=HUNG, check=False
    )
    assert done.returncode == 0, done.stderr
    again = "found none; install pronk again"
    assert done.stdout.splitlines() == [
        f"drafter: kangaroo: expected pronk.lab, {again}",
        f"drafter: lookahead: expected pronk.lab, {again}",
        f"workers: expected pronk.parallel, {again}",
    ]
    packages = {"serve": "server", "train": "train", "bench": "lab"}
    lines = [
        f"pronk: error: {name}: expected pronk.{package}, {again}"
        for name, package in packages.items()
    ]
    assert done.stderr.splitlines() == lines
