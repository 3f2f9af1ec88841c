"""The commands of training among the others."""

from cli import test_main as main
from command_line import Command, assert_mistake


def test_commands_without_arguments_list_their_own(command: Command) -> None:
    assert "train" in command("--help")[1]
    assert "lm" in command("train")[1]


def test_usage_errors_are_one_line_with_a_hint(command: Command) -> None:
    assert_mistake(command("train", "lm", "--foo"), "--foo", "--help')")


def test_help_does_not_wait_for_torch() -> None:
    main.test_help_does_not_wait_for_torch("quantize")
