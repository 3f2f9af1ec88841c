"""``pronk ps`` without a server; tests/server/cli has the others."""

from command_line import Command, assert_mistake


def test_a_missing_server_is_one_line(command: Command) -> None:
    assert_mistake(
        command("ps", "--url", "http://127.0.0.1:9"),
        "ps: expected a server of pronk at http://127.0.0.1:9",
        "start one with pronk serve",
    )


def test_a_wrong_address_is_one_line(command: Command) -> None:
    assert_mistake(command("ps", "--url", "nowhere"), "ps: expected a server of pronk at nowhere")
