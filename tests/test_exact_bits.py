"""Nothing on the way to a token depends on a library's ``exp``, order of a sum, or product.

NumPy chooses such functions for each processor, and the C library for each system. The modules here
use :mod:`pronk.base.exact_math` and :mod:`pronk.kernels.exact_math` in their place.
"""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "pronk"

# Packages whose floats reach tokens, log-probabilities or embeddings. New modules belong to them.
PACKAGES = ("base", "cache", "checkpoint", "engine", "kernels", "models", "parallel", "sampling")
# Modules whose floats reach none of them.
OTHERS = {
    "models/kernels.py": "compares kernels with NumPy within tolerances",
    "models/cost_model.py": "predicts durations",
    "engine/stats.py": "describes what was drafted",
    "engine/validate_draft.py": "checks a drafter's probabilities within a tolerance",
    "parallel/runner.py": "predicts durations",
    "parallel/tree_partition.py": "predicts durations",
}

# Functions of NumPy and ``math`` whose bits, or order of a sum, are not defined. ``math.fsum`` and
# ``sqrt`` are rounded correctly.
FUNCTIONS = frozenset(
    "acos arccos arccosh arcsin arcsinh arctan arctan2 arctanh asin atan atan2 average cbrt convolve "
    "correlate cos cosh cumprod cumsum cumulative_sum dot einsum erf erfc exp exp2 expm1 float_power "
    "gamma hypot inner interp lgamma linalg linspace log log10 log1p log2 logaddexp logaddexp2 "
    "logspace matmul matvec mean nanmean nansum norm outer pow power prod reduce sin sinc sinh std "
    "sum sumprod tan tanh tensordot trapezoid var vdot vecdot vecmat".split()
)
# Methods of arrays among them; other classes have methods ``log`` or ``power`` of their own.
METHODS = frozenset("cumprod cumsum dot mean prod reduce std sum var".split())
# Calls of these names with defined bits.
ALLOWED = {
    "math.prod": "products of integers: shapes",
    "np.bitwise_or.reduce": "integers",
    "np.add.accumulate": "each sum is the one before plus a value, by NumPy's documentation",
    "self.all_reduce.sum": "adds the arrays of all processes in the order of their ranks",
}


@cache
def modules() -> list[Path]:
    paths = [path for package in PACKAGES for path in sorted((SOURCE / package).rglob("*.py"))]
    return [path for path in paths if path.relative_to(SOURCE).as_posix() not in OTHERS]


def undefined_bits(source: str) -> Iterator[str]:
    """Yield the calls and operations of a module whose bits are not defined."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and _is_undefined(node):
            yield ast.unparse(node)
        elif isinstance(node, ast.ImportFrom) and node.module in ("math", "numpy", "cmath"):
            yield from (alias.name for alias in node.names if alias.name in FUNCTIONS - {"prod"})
        elif isinstance(node, (ast.BinOp, ast.AugAssign)) and _is_undefined_operation(node):
            yield ast.unparse(node)


def _is_undefined(node: ast.Attribute) -> bool:
    name = ast.unparse(node)
    if name in ALLOWED:
        return False
    first = name.split(".")[0]
    if first in ("np", "numpy", "math", "cmath"):
        is_accumulation = node.attr in ("accumulate", "reduce", "reduceat")
        return node.attr in FUNCTIONS or is_accumulation
    return node.attr in METHODS


def _is_undefined_operation(node: ast.BinOp | ast.AugAssign) -> bool:
    """Return whether an operation is a product of matrices, or a power of other than literals."""
    if isinstance(node.op, ast.MatMult):
        return True
    if not isinstance(node.op, ast.Pow):
        return False
    is_literal = isinstance(node, ast.BinOp) and isinstance(node.left, ast.Constant)
    return not is_literal


def test_modules_use_functions_with_defined_bits() -> None:
    assert len(modules()) > 100
    found = []
    for path in modules():
        name = path.relative_to(SOURCE).as_posix()
        source = path.read_text(encoding="utf-8")
        found += [f"{name}: {each}" for each in undefined_bits(source)]
    assert found == []


def test_the_other_modules_exist() -> None:
    for name in OTHERS:
        assert (SOURCE / name).is_file()


@pytest.mark.parametrize(
    ("line", "is_found"),
    [
        ("np.log(x)", True),
        ("y = math.exp(x)", True),
        ("np.add.reduce(x)", True),
        ("x.sum(axis=0)", True),
        ("x.astype(np.float64).mean()", True),
        ("a @ b", True),
        ("a @= b", True),
        ("x ** 0.5", True),
        ("x **= 2", True),
        ("np.linalg.norm(x)", True),
        ("from math import log", True),
        ("map(math.exp, x)", True),
        ("2.0 ** -52", False),
        ("2 ** bits", False),
        ("math.sqrt(x)", False),
        ("math.prod(shape)", False),
        ("math.fsum(x)", False),
        ("np.sqrt(x) + x * y", False),
        ("exact_math.log(x)", False),
        ("log(x)", False),
    ],
)
def test_undefined_bits_are_found(line: str, is_found: bool) -> None:
    assert bool([*undefined_bits(line)]) == is_found
