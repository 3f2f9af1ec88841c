"""Rules of the project: public names, imports between layers, prose."""

import ast
import importlib
import re
import subprocess
import sys
import tokenize
import tomllib
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

import pytest

import pronk
import pronk.drafting
from engine_copy import GUESTS, WHOLE
from pronk.drafting.registry import DRAFTERS, REGISTRY, drafter_classes
from waiting import HUNG

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "pronk"
MODULES = sorted(SOURCE.rglob("*.py"))
EXTRAS = {"llama_cpp", "openvino", "openvino_genai"}  # optional packages that the tests may lack

ENVIRONMENT = {"environ", "getenv", "environb", "getenvb"}
# Modules that may use environment variables.
USES_ENVIRONMENT = {
    "lab/bench/peers/process.py",  # passes them on to another program
    "kernels/build.py",  # the compiler in CXX, during an installation
    "engine/workers.py",  # the number of processes that torchrun has started
    "server/replicas/cluster.py",  # Ray's options
    "server/replicas/__init__.py",  # Ray's options
}
# Modules, and packages with a slash at the end, that may import torch. All others work without it.
USES_TORCH = (
    "base/convert.py",
    "lab/bench/machine.py",  # memory of a CUDA device
    "gpu/",
    "lab/bench/peers/engines/hf.py",
    "parallel/connection.py",  # messages between processes
    "parallel/tensor.py",  # all-reduce
    "train/",
)
# Modules that import these, and are themselves imported only for several processes.
NEEDS_THEM = (
    "parallel/processes.py",
    "parallel/runner.py",
    "parallel/start.py",
    "parallel/worker.py",
)


# Layers of the engine, lowest first; guests are above it. A module may import from its own entry
# and from lower layers. A module belongs to the longest entry that is a prefix of its name, so its
# layer may differ from that of its package.
LAYERS = (
    {"base"},
    {"checkpoint"},
    {"kernels"},
    {"text"},
    {"sampling"},
    {"cache"},
    {"models"},
    {"drafting"},
    {"engine"},
    {"llm"},
    {"async_llm"},
    {"reproducibility", "testing"},
    {"diagnosis"},
    # names of other modules
    {"backends", "commands", "serving", "bench", "drafters", "errors", "replicas"},
    {"cli"},
    {"__main__"},
)


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def nodes(path: Path) -> Sequence[ast.AST]:
    return [*ast.walk(tree(path))]


def relative(path: Path) -> str:
    return path.relative_to(SOURCE).as_posix()


def test_public_surface_is_exactly_this() -> None:
    assert set(pronk.__all__) == {
        "LLM", "AsyncLLM", "Choice", "Completion", "ContextFile", "Drafter", "Proposer", "Guide", "Piece", "SamplingParams",
        "TokenTree", "PronkError", "CacheFullError", "CheckpointError", "ClosedError", "ConfigError", "ContextError",
        "DeadlineError", "GuideError", "OptionError", "OverloadedError", "PromptError", "TokenizerError", "BITS", "__version__",
        *drafter_classes(),
    }  # fmt: skip
    assert len(pronk.__all__) == len(set(pronk.__all__))
    for name in pronk.__all__:
        assert getattr(pronk, name) is not None
    with pytest.raises(AttributeError, match="nonsense"):
        pronk.nonsense  # noqa: B018


@pytest.mark.parametrize(
    ("old", "new", "name"),
    [
        ("pronk.drafters", "pronk.drafting", "Proposer"),
        ("pronk.drafters", "pronk", "Suffix"),
        ("pronk.errors", "pronk.base.errors", "PronkError"),
        ("pronk.bench.metrics", "pronk.lab.bench.metrics", "ctar_curve"),
        ("pronk.replicas.application", "pronk.server.replicas.application", "ApplicationArgs"),
    ],
)
def test_former_modules_are_deprecated_aliases(old: str, new: str, name: str) -> None:
    alias = importlib.import_module(old)
    with pytest.warns(DeprecationWarning, match=f"{old} is deprecated; use {new}"):
        found = getattr(alias, name)
    assert found is getattr(importlib.import_module(new), name)


@pytest.mark.parametrize("name", ["pronk.drafters", "pronk.errors"])
def test_former_modules_are_no_packages(name: str) -> None:
    """Otherwise their submodules would be imported a second time, with other classes."""
    assert not hasattr(importlib.import_module(name), "__path__")
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module(f"{name}.registry")


def test_public_modules_have_the_names_of_their_stubs() -> None:
    names = documented_names()
    modules = [name for name in names if hasattr(importlib.import_module(name), "__all__")]
    assert {"pronk.backends", "pronk.drafting", "pronk.lab"} <= {*modules}
    for name in modules:
        module = importlib.import_module(name)
        assert dir(module)
        assert all(hasattr(module, each) for each in names[name])
        with pytest.raises(AttributeError, match=f"module '{name}' has no attribute 'nonsense'"):
            _ = module.nonsense


def test_drafters_by_name() -> None:
    assert len(drafter_classes()) == len(REGISTRY) >= 20
    for name, drafter in pronk.drafting.REGISTRY.items():
        assert drafter.name == name
        assert pronk.drafting.make_drafter(name).name == name


def imports(path: Path) -> Iterator[tuple[str, ...]]:
    """Yield the modules of pronk that a file imports, also in functions, as names below
    ``pronk``.
    """
    for node in nodes(path):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "pronk":
            if node.module != "pronk":
                yield tuple(str(node.module).split(".")[1:])
                continue
            constants = ("BITS", "__version__")
            for name in (alias.name for alias in node.names if alias.name not in constants):
                home = next((home for home, names in pronk._NAMES.items() if name in names), None)
                if home is None and name in drafter_classes():
                    home = REGISTRY[drafter_classes()[name]].__module__
                yield tuple((home or f"pronk.{name}").split(".")[1:])


def layer(module: str) -> tuple[int, str]:
    """Return the layer of a module, and the longest entry of ``LAYERS`` that is a prefix of its
    name.
    """
    entries = [(each, number) for number, names in enumerate(LAYERS) for each in names]
    found = [
        (len(each), number, each) for each, number in entries if f"{module}.".startswith(f"{each}.")
    ]
    assert found, f"{module}: expected an entry in LAYERS, found none; add one"
    return max(found)[1:]


def upward_imports(here: tuple[str, ...], path: Path) -> list[str]:
    """Return imports of module ``here`` from other entries of its layer and from higher layers."""
    own, entry = layer(".".join(here))
    others = [".".join(there) for there in imports(path)]
    return [there for there in others if layer(there)[1] != entry and layer(there)[0] >= own]


def test_packages_import_only_lower_layers() -> None:
    """A package imports only lower layers, without cycles; ``pronk/__init__.py`` may import from
    every layer.
    """
    parts = {path: path.relative_to(SOURCE).with_suffix("").parts for path in MODULES}
    engine = {
        path: here
        for path, here in parts.items()
        if here != ("__init__",) and here[0] not in GUESTS
    }
    found = {relative(path): upward_imports(here, path) for path, here in engine.items()}
    assert {module: upward for module, upward in found.items() if upward} == {}


def documented_names() -> dict[str, set[str]]:
    """Return the names of the API page, by module; a module without ``__all__`` has all that begin
    with a letter.
    """
    page = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    found = {"pronk": {*pronk.__all__}}
    for name in re.findall(r"^::: (pronk\.[\w.]+)$", page, re.MULTILINE):
        path = SOURCE.joinpath(*name.split(".")[1:])
        if path.is_dir() or path.with_suffix(".py").exists():
            module = importlib.import_module(name)
            found[name] = {
                *getattr(module, "__all__", (each for each in vars(module) if each[0] != "_"))
            }
    return found


def private_names(guest: str, path: Path) -> Iterator[str]:
    """Yield the names of pronk that a file of a guest imports, and that are neither its own nor
    documented.
    """
    documented = documented_names()
    for node in ast.walk(tree(path)):
        names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        for module in (name for name in names if name.split(".")[0] == "pronk"):
            if f"{module}.".startswith(f"pronk.{guest}."):
                continue
            for name in (each.name for each in node.names):
                if name not in documented.get(module, ()) and f"{module}.{name}" not in documented:
                    yield f"{module}.{name}"


@pytest.mark.parametrize("guest", GUESTS)
def test_guests_import_only_documented_names(guest: str) -> None:
    paths = [*(SOURCE / guest).rglob("*.py")]
    assert paths
    found = {relative(path): [*private_names(guest, path)] for path in paths}
    assert {module: names for module, names in found.items() if names} == {}


def test_the_engine_imports_no_guest() -> None:
    found = {
        relative(path): [there for there in imports(path) if there[0] in GUESTS] for path in MODULES
    }
    other = {
        module: there
        for module, there in found.items()
        if there and module.split("/")[0] not in GUESTS
    }
    assert other.keys() == {"__init__.py"}, "only this one may, for type checkers"


def guests_in_a_test(path: Path) -> list[str]:
    """Return the imports of guests, and of the folders of their tests, in a file of the engine's
    tests.
    """
    imports = (node for node in nodes(path) if isinstance(node, (ast.Import, ast.ImportFrom)))
    return [ast.unparse(node) for node in imports if any(map(is_of_a_guest, modules_of(node)))]


def modules_of(node: ast.Import | ast.ImportFrom) -> list[str]:
    """Return the modules that a statement imports, and what it imports of them."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    return [f"{node.module}.{alias.name}" for alias in node.names]


def is_of_a_guest(module: str) -> bool:
    first, *rest = module.split(".")
    return (first == "pronk" and rest[:1] != [] and rest[0] in GUESTS) or first in GUESTS


def test_the_engines_tests_import_no_guest() -> None:
    """A test that needs a guest is in the guest's folder of tests; ``engine_copy.WHOLE`` tests the
    whole repository.
    """
    tests = ROOT / "tests"
    apart = {*GUESTS, *WHOLE}
    own = [path for path in tests.rglob("*.py") if path.relative_to(tests).parts[0] not in apart]
    assert len(own) > 200
    found = {path.relative_to(tests).as_posix(): guests_in_a_test(path) for path in own}
    assert {name: lines for name, lines in found.items() if lines} == {}


@pytest.mark.parametrize(
    ("line", "is_refused"),
    [
        ("from pronk.lab.drafters.lookahead import LookaheadProposer", True),
        ("import pronk.server.service", True),
        ("from pronk import train", True),
        ("from lab.drafters import exits", True),
        ("from parallel.dealt import partition_randomly", True),
        ("from torch import Tensor", False),
    ],
)
def test_imports_of_guests_are_found(line: str, is_refused: bool, tmp_path: Path) -> None:
    (tmp_path / "new.py").write_text(f"def late() -> None:\n    {line}\n", encoding="utf-8")
    assert guests_in_a_test(tmp_path / "new.py") == ([line] if is_refused else [])


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("from pronk.models.decoder import Decoder", ["pronk.models.decoder.Decoder"]),
        ("from pronk.backends import Program, _secret", ["pronk.backends._secret"]),
        ("from pronk import LLM, nonsense", ["pronk.nonsense"]),
        ("from pronk.backends import Program", []),
        ("from pronk.lab.drafters.lookahead import Lookahead", []),
    ],
)
def test_private_names_are_found(line: str, found: list[str], tmp_path: Path) -> None:
    (tmp_path / "new.py").write_text(f"def late() -> None:\n    {line}\n", encoding="utf-8")
    assert [*private_names("lab", tmp_path / "new.py")] == found


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("from pronk.engine.engine import Engine", "engine.engine"),
        ("from pronk import LLM", "llm"),
        ("from pronk import Eagle3", None),
        ("from pronk.models.decoder import Decoder", None),
        ("from pronk import AsyncLLM", "async_llm"),
        ("from pronk.sampling.tree import TokenTree", None),
        ("from pronk.drafting.trie import Trie", None),
    ],
)
def test_upward_imports_are_found(line: str, found: str | None, tmp_path: Path) -> None:
    (tmp_path / "new.py").write_text(f"def late() -> None:\n    {line}\n", encoding="utf-8")
    expected = [] if found is None else [found]
    assert upward_imports(("drafting", "from_text", "new"), tmp_path / "new.py") == expected


def test_drafter_packages_import_only_shared_helpers() -> None:
    """A file is in the registry, or begins with an underscore and is imported by its own package
    only.
    """
    drafting = SOURCE / "drafting"
    homes = {
        home.split(":")[0].removeprefix("drafting.").replace(".", "/") for home in DRAFTERS.values()
    }
    for package in ("from_text", "from_outputs", "from_draft", "from_target", "combined"):
        for path in (drafting / package).glob("*.py"):
            name = f"{package}/{path.stem}"
            assert (name in homes) != path.stem.startswith("_"), (
                f"{name}: expected a method's name or an underscore"
            )
    for path in MODULES:
        here = path.relative_to(SOURCE).parts
        for there in imports(path):
            helper = next(
                (i for i, part in enumerate(there) if part.startswith("_") and part != "__init__"),
                None,
            )
            assert helper is None or here[:helper] == there[:helper], (
                f"{'.'.join(there)} is private to its package"
            )


def module_faults(path: Path) -> Iterator[str]:
    """Yield the faults of a module: no docstring, an import that fails."""
    if not ast.get_docstring(tree(path)):
        yield "no docstring"
    name = ".".join(path.relative_to(SOURCE.parent).with_suffix("").parts).removesuffix(".__init__")
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name not in EXTRAS:
            yield f"needs {error.name}, which is not installed"


def test_modules() -> None:
    """Every module has a docstring and can be imported."""
    found = {relative(path): [*module_faults(path)] for path in MODULES}
    assert {module: faults for module, faults in found.items() if faults} == {}


def test_library_neither_prints_nor_reads_the_environment() -> None:
    found = []
    for path in MODULES:
        for node in nodes(path):
            if isinstance(node, ast.Name) and node.id == "print":
                found.append(f"{relative(path)}:{node.lineno}: print")
            if (
                isinstance(node, ast.Attribute)
                and node.attr in ENVIRONMENT
                and relative(path) not in USES_ENVIRONMENT
            ):
                found.append(f"{relative(path)}:{node.lineno}: {node.attr}")
    assert found == []


def imported_modules(path: Path) -> Iterator[str]:
    """Yield the modules that a file imports, also in functions."""
    for node in nodes(path):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_only_these_modules_import_torch() -> None:
    users = {
        relative(path)
        for path in MODULES
        if any(name.split(".")[0] == "torch" for name in imported_modules(path))
    }
    assert [name for name in sorted(users) if not name.startswith(USES_TORCH)] == []
    assert all(any(name.startswith(prefix) for name in users) for prefix in USES_TORCH)


@pytest.mark.long
def test_pronk_works_without_torch() -> None:
    """A process in which torch cannot be imported loads all other modules and a model, and
    generates.
    """
    paths = [
        relative(path)
        for path in MODULES
        if not relative(path).startswith((*USES_TORCH, *NEEDS_THEM))
    ]
    names = [path.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for path in paths]
    modules = [f"pronk.{name}" for name in names if not name.startswith("__")]
    code = """
import sys
MODULES, EXTRAS = eval(sys.argv[1])
sys.modules["torch"] = None
import importlib
for name in MODULES:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        assert error.name in EXTRAS, name
from pronk import LLM, OptionError, SamplingParams
llm = LLM("pronk-tiny", threads=1)
texts = [llm.generate("def fib(n):", SamplingParams(max_tokens=16, temperature=t, seed=1)).text for t in (0.0, 0.8)]
assert all(texts)
try:
    LLM("pronk-tiny", workers=2)
except OptionError as error:
    print(error)
"""
    arguments = [sys.executable, "-c", code, repr((modules, EXTRAS))]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=HUNG, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    message = (
        "workers: expected torch, found none; run pip install '.[parallel]' in a clone of pronk"
    )
    assert done.stdout == f"{message}\n"


# Modules that read text in another way: files that pronk writes and packages itself, or that the
# system writes; and a method of the same name.
OWN_FILES = {
    "diagnosis.py",
    "lab/bench/peers/engines/memory.py",
    "train/corpus/questions.py",
    "drafting/from_outputs/recycling.py",
    "checkpoint/hub/cache.py",
    "kernels/build.py",
    "kernels/library.py",
    "kernels/threads.py",
    "base/lazy.py",
    "train/quantization/heads.py",
    "train/card.py",
    "train/clock.py",
    "train/data.py",
    "train/on_policy.py",
}


def test_no_other_module_reads_text() -> None:
    """Text files of users are read with :func:`pronk.base.files.text.read_text`."""
    found = {
        relative(path) for path in MODULES if ".read_text(" in path.read_text(encoding="utf-8")
    }
    assert found == OWN_FILES


# Functions that write files by themselves, by module, with the reason why files/atomic.py does not
# fit.
WRITES = {
    "lab/bench/peers/engines/memory.py": (
        {"reset_peak_memory"},
        "a switch of the Linux kernel, not a file",
    ),
    "lab/bench/peers/worker.py": ({"main"}, "a pipe to the parent process"),
    "lab/cli/bench.py": ({"_open_trace"}, "a log to which each measurement is appended"),
    "cli/streams.py": ({"_discard"}, "the null device"),
    "train/corpus/answers.py": ({"__init__", "append"}, "a log to which dialogues are appended"),
    "drafting/from_text/_suffix_store.py": (
        {"_append_line", "_read_file"},
        "a log that several processes share",
    ),
    "lab/drafters/datastore/builder.py": (
        {"_write_tokens"},
        "a stream into a folder that is renamed at the end",
    ),
    "models/shards.py": (
        {"copy_companions", "write_weights"},
        "files of a folder that is renamed at the end",
    ),
    "checkpoint/hub/download.py": (
        {"_fetch_large_file"},
        "a download that is resumed; checked by its hash and renamed",
    ),
    "kernels/build.py": ({"build"}, "a temporary folder; copied to a partial file and renamed"),
    "cache/block_database.py": ({"_create_file"}, "the database of SQLite"),
    "server/batch.py": ({"__init__"}, "a log to which each answer is appended"),
    "testing.py": ({"tiny_checkpoint"}, "checkpoints for tests"),
    "train/export.py": ({"export_tensors"}, "a file of a folder that is renamed at the end"),
    "train/on_policy.py": ({"continue_prompts", "_restore"}, "a log to which texts are appended"),
}
COPIES = {"copyfile", "copy", "copy2", "copytree", "move"}


def is_write(call: ast.Call) -> bool:
    """Return whether a call opens a file for writing, or writes, copies or moves one."""
    function = call.func
    method = function.attr if isinstance(function, ast.Attribute) else ""
    name = method or getattr(function, "id", "")
    owner = ast.unparse(function.value) if isinstance(function, ast.Attribute) else ""
    arguments = [*call.args, *(keyword.value for keyword in call.keywords)]
    if name in COPIES:
        return owner == "shutil"
    if name == "dump":
        return owner in {"json", "pickle"} and "sys.stdout" not in map(ast.unparse, arguments)
    if name == "save":
        return owner in {"np", "numpy"}
    if name == "savefig":
        return "buffer" not in map(ast.unparse, arguments)
    if name in {"open", "fdopen"}:
        texts = [
            each.value
            for each in arguments
            if isinstance(each, ast.Constant) and isinstance(each.value, str)
        ]
        flags = {
            node.attr
            for each in arguments
            for node in ast.walk(each)
            if isinstance(node, ast.Attribute)
        }
        is_mode = any(
            re.fullmatch(r"[rwaxbt+]{1,3}", text) and set(text) & set("wax+") for text in texts
        )
        return is_mode or bool(flags & {"O_WRONLY", "O_RDWR"})
    return name == "save_file" or method in {"write_text", "write_bytes", "tofile"}


def writing_functions(node: ast.AST, function: str = "module") -> Iterator[str]:
    """Yield the name of the function around each call below ``node`` that writes a file by
    itself.
    """
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        function = node.name
    if isinstance(node, ast.Call) and is_write(node):
        yield function
    for child in ast.iter_child_nodes(node):
        yield from writing_functions(child, function)


def test_files_are_written_atomically() -> None:
    """A crash or a full disk leaves the old file: only logs and temporary folders have other
    ways.
    """
    found = {
        relative(path): {*writing_functions(tree(path))}
        for path in MODULES
        if relative(path) != "base/files/atomic.py"
    }
    assert {module: names for module, names in found.items() if names} == {
        module: names for module, (names, _reason) in WRITES.items()
    }


@pytest.mark.parametrize(
    ("line", "writes"),
    [
        ("path.write_text('x')", True),
        ("path.write_bytes(b'x')", True),
        ("path.open('w', encoding='utf-8')", True),
        ("path.open(mode='ab')", True),
        ("open(path, 'r+b')", True),
        ("os.open(path, os.O_WRONLY | os.O_APPEND)", True),
        ("shutil.copyfile(a, b)", True),
        ("json.dump(value, file)", True),
        ("array.tofile(path)", True),
        ("figure.savefig(path)", True),
        ("figure.savefig(buffer, format='svg')", False),
        ("path.open('rb')", False),
        ("path.open(encoding='utf-8')", False),
        ("Datastore.open(folder)", False),
        ("value.copy()", False),
        ("llm.calibration.save()", False),
    ],
)
def test_writes_are_found(line: str, writes: bool) -> None:
    (statement,) = ast.parse(line).body
    assert isinstance(statement, ast.Expr)
    assert isinstance(statement.value, ast.Call)
    assert is_write(statement.value) is writes


# Calls in tests that look at a clock or wait for a duration, by module, with their reason. All
# others wait for events by ``waiting.py``, state an amount of work, or give a clock.
WAITS = {
    "cache/test_block_store.py": ({"sleep"}, "the moment of a kill"),
    "models/test_prompt_cache.py": ({"sleep"}, "the moment of a kill"),
    "parallel/test_trees.py": ({"sleep"}, "the work of a slow worker"),
    "server/replicas/test_cluster.py": ({"sleep"}, "the pace of kills"),
    "server/replicas/test_dispatcher.py": ({"deadline"}, "work that waits for the end of the test"),
    "server/test_model_pool.py": ({"idle_seconds", "seconds"}, "a given clock; a model held back"),
    "server/test_robust.py": (
        {"receive_seconds", "send_seconds", "drain_seconds"},
        "clients that never send or read: a limit that passes early has the same effect",
    ),
    "server/serving.py": ({"wait"}, "the pace of an engine that is held"),
    "test_async_llm.py": ({"deadline", "perf_counter"}, "occupied threads; a given clock"),
    "train/test_kill.py": ({"sleep"}, "the moment of a kill"),
    "lab/verification/test_remote.py": ({"timeout"}, "a server that never answers"),
    "waiting.py": ({"monotonic", "perf_counter", "sleep"}, "the helpers of the others"),
}
CLOCKS = {"monotonic", "perf_counter", "process_time", "sleep", "Timer"}
WITH_LIMITS = {"communicate", "join", "result", "settimeout", "wait", "wait_for"}
# options in seconds
LIMITS = {
    "timeout",
    "deadline",
    "drain_seconds",
    "idle_seconds",
    "receive_seconds",
    "send_seconds",
}


def is_number(node: ast.AST, *, positive: bool) -> bool:
    return (
        isinstance(node, ast.Constant)
        and isinstance(node.value, (int, float))
        and (node.value > 0) == positive
    )


def timings(path: Path) -> Iterator[str]:
    """Yield the names of calls that look at a clock, and of calls and options that wait for a
    number of seconds.
    """
    text = path.read_text(encoding="utf-8")
    if not any(name in text for name in (*CLOCKS, *WITH_LIMITS, *LIMITS, "RequestLimits")):
        return
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.Call):
            continue
        name = (
            node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        )
        is_yield = name == "sleep" and is_number(node.args[0], positive=False)  # to other tasks
        has_limit = name in WITH_LIMITS and any(
            is_number(each, positive=True) for each in node.args[-1:]
        )
        if has_limit or (name in CLOCKS and not is_yield):
            yield name
        for word in node.keywords:
            is_limit = word.arg in LIMITS or (word.arg == "seconds" and name == "RequestLimits")
            if word.arg is not None and is_limit and is_number(word.value, positive=True):
                yield word.arg


def test_tests_wait_for_events() -> None:
    """A test holds on a busy machine: it assumes no duration."""
    tests = ROOT / "tests"
    found = {
        path.relative_to(tests).as_posix(): {*timings(path)} for path in sorted(tests.rglob("*.py"))
    }
    assert {module: names for module, names in found.items() if names} == {
        module: names for module, (names, _reason) in WAITS.items()
    }


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("assert time.perf_counter() - start < 5", ["perf_counter"]),
        ("time.sleep(0.5)", ["sleep"]),
        ("time.sleep(dice.random())", ["sleep"]),
        ("asyncio.sleep(0)", []),
        ("thread.join(10)", ["join"]),
        ("event.wait(HUNG)", []),
        ("asyncio.wait_for(main(), 30)", ["wait_for"]),
        ("subprocess.run(words, timeout=60)", ["timeout"]),
        ("subprocess.run(words, timeout=HUNG)", []),
        ("Timer(1.5, stop)", ["Timer"]),
        ("RequestLimits(seconds=0.05, requests=2)", ["seconds"]),
        ("Speedup(seconds=0.05)", []),
        ("engine.generate(text, deadline=0.1)", ["deadline"]),
        ("engine.generate(text, deadline=0.0)", []),
    ],
)
def test_timings_are_found(line: str, found: list[str], tmp_path: Path) -> None:
    (tmp_path / "test_new.py").write_text(line, encoding="utf-8")
    assert [*timings(tmp_path / "test_new.py")] == found


# no first words of a docstring
RIDDLES = {"What", "Of", "Whose", "Where", "Who", "That", "So", "Or", "There", "See"}
PERSONS = re.compile(r"\b(who|whoever|whom|nobody|somebody|anybody)\b", re.IGNORECASE)


def prose_faults(path: Path) -> Iterator[str]:
    """Yield violations of three rules: length and first word of docstrings, and no persons as
    subjects.
    """
    for node in nodes(path):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            text = ast.get_docstring(node) or ""
            first = text.partition("\n")[0]
            where = getattr(node, "name", "module")
            if len(first) > 100:
                yield f"{where}: a first line of {len(first)} characters, expected at most 100"
            if first.partition(" ")[0] in RIDDLES:
                yield f"{where}: begins with {first.partition(' ')[0]}"
            if (found := PERSONS.search(text)) is not None:
                yield f"{where}: says {found[0]!r}"
    with path.open("rb") as file:
        for token in tokenize.tokenize(file.readline):
            if (
                token.type == tokenize.COMMENT
                and (found := PERSONS.search(token.string)) is not None
            ):
                yield f"line {token.start[0]}: a comment says {found[0]!r}"


def test_prose() -> None:
    """Docstrings have a short first line; docstrings and comments do not speak of persons."""
    found = {relative(path): [*prose_faults(path)] for path in MODULES}
    assert {module: faults for module, faults in found.items() if faults} == {}


MAX_PARAMETERS = 8  # of a function, without self: values that belong together are one parameter


def long_signatures(path: Path) -> Iterator[str]:
    """Yield the names of functions with more than ``MAX_PARAMETERS`` parameters."""
    for node in nodes(path):
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        given = node.args
        names = [each.arg for each in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
        rest = [each for each in (given.vararg, given.kwarg) if each is not None]
        if len(names) + len(rest) - (names[:1] in (["self"], ["cls"])) > MAX_PARAMETERS:
            yield node.name


def test_functions_have_few_parameters() -> None:
    """A function of the engine takes options as one value; on the command line, each is a
    parameter.
    """
    engine = [path for path in MODULES if relative(path).split("/")[0] not in {*GUESTS, "cli"}]
    found = {relative(path): [*long_signatures(path)] for path in engine}
    assert {module: names for module, names in found.items() if names} == {}


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("def f(a, b, c, d, /, e, *, g, h, i): ...", []),
        ("def f(a, b, c, d, /, e, *, g, h, i, j): ...", ["f"]),
        ("async def f(self, a, b, c, d, e, g, h, **options): ...", []),
        ("async def f(self, a, b, c, d, e, g, h, *given, **options): ...", ["f"]),
    ],
)
def test_long_signatures_are_found(line: str, found: list[str], tmp_path: Path) -> None:
    (tmp_path / "new.py").write_text(line, encoding="utf-8")
    assert [*long_signatures(tmp_path / "new.py")] == found


def test_class_names_are_unique() -> None:
    """No public class name is defined in two modules."""
    homes: dict[str, list[str]] = {}
    for path in MODULES:
        for node in tree(path).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes.setdefault(node.name, []).append(relative(path))
    assert {name: modules for name, modules in homes.items() if len(modules) > 1} == {}


MAX_CHAIN = 3  # classes of pronk on the longest chain of inheritance of a class for drafting


def chain_length(cls: type) -> int:
    """Return the number of pronk's classes on the longest chain of inheritance that ends with
    ``cls``.
    """
    return max(map(chain_length, cls.__bases__), default=0) + cls.__module__.startswith("pronk.")


def test_drafters_are_composed_not_inherited() -> None:
    paths = [
        path for folder in ("drafting", "lab/drafters") for path in (SOURCE / folder).rglob("*.py")
    ]
    names = {
        ".".join(path.relative_to(SOURCE.parent).with_suffix("").parts): path for path in paths
    }
    classes = {
        cls
        for name in names
        for cls in vars(importlib.import_module(name.removesuffix(".__init__"))).values()
        if isinstance(cls, type) and cls.__module__ in names
    }
    lengths = {cls.__qualname__: chain_length(cls) for cls in classes}
    assert {name: length for name, length in lengths.items() if length > MAX_CHAIN} == {}
    assert (lengths["Drafter"], lengths["Proposer"], lengths["Eagle3Proposer"]) == (1, 2, 3)


def test_versions_agree() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["dynamic"] == ["version"]  # read from pronk/__init__.py
    releases = re.findall(
        r"^## \[(\d.*)\] - \d{4}-\d\d-\d\d$",
        (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"),
        re.MULTILINE,
    )
    assert releases[0] == pronk.__version__
    assert (
        (ROOT / "LICENSE")
        .read_text(encoding="utf-8")
        .strip()
        .startswith(project["license"].split("-")[0])
    )


def test_constraints_pin_all_requirements() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    asked = [
        *project["dependencies"],
        *(each for group in project["optional-dependencies"].values() for each in group),
    ]
    names = {re.match(r"[\w-]+", requirement)[0] for requirement in asked} - {"pronk"}  # type: ignore[index]
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = dict(line.split("==") for line in lines if not line.startswith("#"))
    assert names | {"build", "ziglang"} == set(pins)  # the two tools of `make wheels`
    assert pins["torch"] == "2.13.0"
