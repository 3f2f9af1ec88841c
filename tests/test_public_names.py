"""Rules of the names on the API page: their fields are documented, and their types are public."""

import dataclasses
import importlib
import inspect
import re
import sys
from collections.abc import Iterator
from functools import cached_property
from typing import Any

import pytest

from pronk.backends import BatchEntry, ForwardResult
from pronk.drafting import Drafter
from test_project import documented_names

# Modules with which a drafter is written and used. Classes in signatures of the others may be
# private to the engine: a caller gets them from it, and gives them back.
FOR_DRAFTERS = ("pronk", "pronk.drafting", "pronk.testing")
# Classes whose methods the engine calls; a drafter passes their objects on.
OF_THE_ENGINE = {"pronk.drafting.RequestLedger"}
# Modules in which comments beside the fields describe them.
WITH_COMMENTS = (
    "pronk.models.",
    "pronk.checkpoint.config",
    "pronk.drafting.from_target.modules.eagle_names",
)


def public_objects(*modules: str) -> dict[str, Any]:
    """Return the public objects of these modules, by default of all, by ``module.name``."""
    return {
        f"{module}.{name}": getattr(importlib.import_module(module), name)
        for module, names in documented_names().items()
        if not modules or module in modules
        for name in names
    }


def fields_of(cls: type) -> list[str]:
    """Return the public fields of a named tuple or dataclass; of another class, none."""
    if issubclass(cls, tuple):
        return [*getattr(cls, "_fields", ())]
    names = (
        [field.name for field in dataclasses.fields(cls)] if dataclasses.is_dataclass(cls) else []
    )
    return [name for name in names if not name.startswith("_")]


def undocumented_fields(cls: type) -> list[str]:
    """Return the fields that no section ``Attributes`` of the class or of its bases describes."""
    described = set[str]()
    for each in cls.__mro__:
        _, _, section = inspect.cleandoc(each.__doc__ or "").partition("\nAttributes:\n")
        described.update(re.findall(r"^ {4}(\w+): \S", section, re.MULTILINE))
    return [name for name in fields_of(cls) if name not in described]


def test_fields_of_public_classes_are_documented() -> None:
    classes = {
        cls: name
        for name, cls in public_objects().items()
        if isinstance(cls, type) and cls.__module__.startswith("pronk.")
        if not cls.__module__.startswith(WITH_COMMENTS)
    } | {BatchEntry: "BatchEntry", ForwardResult: "ForwardResult"}
    assert sum(bool(fields_of(cls)) for cls in classes) > 60
    found = {name: undocumented_fields(cls) for cls, name in classes.items()}
    assert {name: fields for name, fields in found.items() if fields} == {}


@dataclasses.dataclass
class Example:
    """A class for the tests below.

    Attributes:
        first: a field with a description.
    """

    first: int
    second: int = 0
    _own: int = 0


def test_undocumented_fields_are_found() -> None:
    assert undocumented_fields(Example) == ["second"]


def annotations_of(found: Any) -> Iterator[tuple[Any, str]]:
    """Yield the annotations of a function, or of a class's fields and public members.

    Each is a pair with the name of its module. A subclass of ``Drafter`` implements that interface
    with states and proposers of its own, so only its fields count.
    """
    members = [found]
    if isinstance(found, type):
        for name, annotation in inspect.get_annotations(found).items():
            if not name.startswith("_"):
                yield annotation, found.__module__
        is_method = found.__mro__[1:].count(Drafter)
        members = [] if is_method else [*public_members(found)]
    for member in map(inspect.unwrap, filter(inspect.isfunction, members)):
        for annotation in inspect.get_annotations(member).values():
            yield annotation, member.__module__


def public_members(cls: type) -> Iterator[Any]:
    """Yield the functions of a class that callers use, also those behind properties."""
    for name, member in vars(cls).items():
        if name.startswith("_") and name != "__init__":
            continue
        if isinstance(member, property):
            yield member.fget
        elif isinstance(member, cached_property):
            yield member.func
        else:
            yield getattr(member, "__func__", member)


def private_types(found: Any, public: set[int]) -> set[str]:
    """Return the classes of pronk in the signatures of an object that are not ``public``."""
    names = set[str]()
    for annotation, module in annotations_of(found):
        for word in re.findall(r"[A-Za-z_]\w*", str(annotation)):
            cls = getattr(sys.modules[module], word, None)
            is_own = isinstance(cls, type) and cls.__module__.startswith("pronk.")
            if is_own and id(cls) not in public:
                names.add(f"{cls.__module__}.{cls.__name__}")
    return names


def test_types_in_signatures_for_drafters_are_public() -> None:
    public = {id(each) for each in public_objects().values()}
    found = {
        name: private_types(each, public)
        for name, each in public_objects(*FOR_DRAFTERS).items()
        if name not in OF_THE_ENGINE
    }
    assert len(found) > 100
    assert {name: types for name, types in found.items() if types} == {}


@pytest.mark.parametrize("is_public", [True, False])
def test_private_types_are_found(is_public: bool) -> None:
    from pronk.drafting import LoadedModels, Target

    public = {id(each) for each in public_objects().values()}
    if not is_public:
        public.remove(id(LoadedModels))
    expected = set() if is_public else {"pronk.drafting.loaded_models.LoadedModels"}
    assert private_types(Target, public) == expected
