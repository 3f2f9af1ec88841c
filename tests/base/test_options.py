"""Options that are declared once: ranges in words, checks, and constructors that take them."""

from __future__ import annotations

import inspect
import subprocess
import sys
from dataclasses import KW_ONLY, dataclass, replace
from typing import Annotated, Any, Literal

import pytest

from pronk.base.errors import OptionError
from pronk.base.options import Option, check_options, declared_options, documented, takes
from waiting import HUNG


class Oven:
    """A type that the options below name by a text."""


@dataclass(frozen=True)
class OvenOptions:
    """Options whose annotations are texts, because this module imports them from the future."""

    degrees: Annotated[int, Option("Temperature in Celsius.", low=50, high=300)] = 220
    name: str = "oven"


def declare() -> Any:
    number = int
    flag = bool
    text = str
    share = float
    way = Literal["gas", "wood"]
    limit = int | None
    namespace: dict[str, Any] = {
        "__annotations__": {
            "loaves": Annotated[number, Option("Number of loaves.", low=1, high=9)],
            "_": KW_ONLY,
            "flour": Annotated[text, Option("Kind of flour.", choices=("rye", "wheat"))],
            "salt": Annotated[share, Option("Share of salt.", low=0.0, high=1.0, exclusive_min=True)],
            "heat": Annotated[way, Option("Kind of heat.", details="Wood takes longer.")],
            "steam": Annotated[flag, Option("Use steam.")],
            "minutes": Annotated[limit, Option("Minutes to bake.", low=0, absent="until it is brown")],
            "baker": Annotated["Oven", Option("Name of the baker.")],
            "undeclared": number,
        },
        "loaves": 2, "flour": "rye", "salt": 0.02, "heat": "gas", "steam": True, "minutes": None, "baker": None,
        "undeclared": 0,
        "__post_init__": check_options,
        "__doc__": "Options of bread.",
    }  # fmt: skip
    return documented(dataclass(frozen=True)(type("BreadOptions", (), namespace)))


BreadOptions = declare()


class Bread:
    @takes(BreadOptions)
    def __init__(self, options: Any) -> None:
        """Bake bread.

        Raises ``OptionError``.
        """
        self.options = options


@pytest.mark.parametrize(
    ("option", "range_text", "help_text"),
    [
        (Option("A number."), "", "A number."),
        (Option("A number.", low=0), "at least 0", "A number."),
        (Option("A number.", low=1), "at least 1", "A number. At least 1."),
        (Option("A number.", low=0, high=2**63 - 1), "0..2^63-1", "A number. 0..2^63-1."),
        (Option("A number.", low=-2.0, high=2.0), "-2..2", "A number. -2..2."),
        (Option("A number.", low=0.0, high=1e9), "0..1e9", "A number. 0..1e9."),
        (Option("A number.", low=0.0, exclusive_min=True), "above 0", "A number. Above 0."),
        (
            Option("A number.", low=0.0, high=1.0, exclusive_min=True),
            "above 0 to 1",
            "A number. Above 0 to 1.",
        ),
    ],
)
def test_ranges_in_words(option: Option, range_text: str, help_text: str) -> None:
    assert (option.range, option.help) == (range_text, help_text)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loaves": 0}, "loaves: expected an integer in 1..9, found 0"),
        ({"loaves": 1.0}, "loaves: expected an integer in 1..9, found 1.0"),
        ({"flour": "rey"}, "flour: expected one of rye, wheat, found 'rey'; did you mean rye?"),
        ({"salt": 0}, "salt: expected a number above 0 and at most 1, found 0"),
        ({"heat": "oil"}, "heat: expected one of gas, wood, found 'oil'"),
        ({"steam": 1}, "steam: expected true or false, found 1"),
        ({"minutes": -1}, "minutes: expected an integer of at least 0, found -1"),
    ],
)
def test_values_out_of_range(options: dict[str, Any], message: str) -> None:
    for make in (BreadOptions, Bread):
        with pytest.raises(OptionError) as caught:
            make(**options)
        assert str(caught.value) == message
    with pytest.raises(OptionError):
        replace(BreadOptions(), **options)


def test_a_constructor_takes_options() -> None:
    assert Bread(3, salt=1.0, minutes=None).options == BreadOptions(3, salt=1.0)
    assert str(inspect.signature(Bread)) == (
        "(loaves: int = 2, *, flour: str = 'rye', salt: float = 0.02, heat: Literal['gas', 'wood'] "
        "= 'gas', "
        "steam: bool = True, minutes: int | None = None, baker: 'Oven' = None, undeclared: int = "
        "0) -> None"
    )
    text = Bread.__init__.__doc__
    assert text is not None
    assert text.startswith("Bake bread.\n\nArgs:\n    loaves: Number of loaves. 1..9.\n")
    assert "    heat: Kind of heat. Wood takes longer.\n" in text
    assert "    minutes: Minutes to bake. ``None``: until it is brown.\n" in text
    assert text.endswith("\n\nRaises ``OptionError``.")
    assert BreadOptions.__doc__.startswith(
        "Options of bread.\n\nAttributes:\n    loaves: Number of loaves. 1..9.\n"
    )


def test_declared_options() -> None:
    found = declared_options(BreadOptions)
    assert [*found] == ["loaves", "flour", "salt", "heat", "steam", "minutes", "baker"]
    assert (found["minutes"].kind, found["minutes"].optional, found["minutes"].default) == (
        int,
        True,
        None,
    )
    assert (found["baker"].kind, found["baker"].owner) == ("Oven", BreadOptions)
    assert found["heat"].choices == ("gas", "wood")


def test_declarations_import_neither_numpy_nor_the_engine() -> None:
    """``pronk generate --help`` imports them."""
    code = """
import sys
import pronk.engine.options, pronk.sampling.params
print({"numpy", "torch", "pydantic", "pronk.engine.engine", "pronk.llm", "pronk.models.decoder"} & {*sys.modules})
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=HUNG, check=True
    )
    assert done.stdout == "set()\n"


def test_annotations_that_are_texts_declare_options() -> None:
    assert isinstance(inspect.get_annotations(OvenOptions)["degrees"], str)
    (declared,) = declared_options(OvenOptions).values()
    assert (declared.name, declared.kind, declared.option.high) == ("degrees", int, 300)
    check_options(OvenOptions())
    with pytest.raises(OptionError) as error:
        check_options(OvenOptions(degrees=7), "oven: ")
    assert str(error.value) == "oven: degrees: expected an integer in 50..300, found 7"
