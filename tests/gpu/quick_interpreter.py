"""Triton's interpreter in a third of its time, with the same results."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from triton.runtime import interpreter


@contextmanager
def quick_interpreter() -> Iterator[None]:
    """Leave out three parts of the interpreter's work, which change no number.

    - Functions of the language are replaced once for each module of kernels, in place of at each
      launch and each call inside a kernel.
    - The type of an array is looked up once.
    - Sums and products in 32 bits are not repeated in 64 bits to find overflows. The models of the
      tests are too small to have any.
    """
    builder = interpreter.interpreter_builder
    language = _Language(interpreter._patch_lang)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_patch_lang", language.replace)
        patch.setattr(interpreter, "_get_np_dtype", _ArrayTypes(interpreter._get_np_dtype))
        patch.setattr(builder, "options", replace(builder.options, sanitize_overflow=False))
        yield
        language.restore()


class _Language:
    """Functions of ``triton.language``, which the interpreter replaces by its own."""

    def __init__(self, replace_for: Callable[[Any], Any]) -> None:
        self._replace_for = replace_for
        self._scopes = dict[str, Any]()  # by modules

    def replace(self, function: Any) -> Any:
        """Replace the language for a function; return what its caller restores: nothing."""
        module: str = function.__module__
        if module not in self._scopes:
            self._scopes[module] = self._replace_for(function)
        return interpreter._LangPatchScope()

    def restore(self) -> None:
        for scope in reversed(self._scopes.values()):
            scope.restore()


class _ArrayTypes:
    """Types of NumPy's arrays, by those of Triton, which have names but not all are hashable."""

    def __init__(self, look_up: Callable[[Any], np.dtype[Any]]) -> None:
        self._look_up = look_up
        self._found = dict[str, np.dtype[Any]]()

    def __call__(self, type_: Any) -> np.dtype[Any]:
        name: str = type_.name
        if name not in self._found:
            self._found[name] = self._look_up(type_)
        return self._found[name]
