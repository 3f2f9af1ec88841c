"""The commands of the lab among the others."""

from cli import test_main as main


def test_help_does_not_wait_for_torch() -> None:
    main.test_help_does_not_wait_for_torch("datastore")
