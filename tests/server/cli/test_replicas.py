"""Options that replicas cannot have: a one-line error before Ray starts."""

import importlib.util
import os
import socket
from typing import Any

import pytest

from command_line import Command, assert_mistake


@pytest.fixture(autouse=True)
def two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["--replicas", 3, "--threads", 1],
            "replicas: expected at most 2 of 1 threads each on the 2 cores of this ",
        ),
        (
            ["--replicas", 2, "--workers", 2],
            "replicas: expected at most 1 of 2 threads each on the 2 cores of this ",
        ),
        (
            ["--replicas", 2, "--min-replicas", 3],
            "min-replicas: expected at most --replicas (2), found 3",
        ),
        (
            ["--replicas", 2, "--calibration", "counts.json"],
            "calibration: expected on or off with replicas",
        ),
        (["--replicas", 2, "--drafter", "nonsense"], "found 'nonsense'"),
        (["--replicas", 2, "--also", "nonsense"], "found 'nonsense'"),
    ],
)
def test_options_that_replicas_refuse(
    command: Command, options: list[object], message: str
) -> None:
    assert_mistake(command("serve", "--port", 0, *options), message)


def test_without_ray(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    def find(name: str, *more: Any) -> Any:
        return None if name == "ray" else found(name, *more)

    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", find)
    message = "replicas: expected ray, found none; run pip install '.[ray]' in a clone of pronk"
    assert_mistake(command("serve", "--port", 0, "--replicas", 2), message)


def test_a_port_in_use_is_found_before_replicas_are_begun(command: Command) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        message = (
            f"port: expected an address to listen at, found 127.0.0.1:{port}: "
            "Address already in use; "
        )
        assert_mistake(command("serve", "--replicas", 2, "--port", port), message)


def test_a_missing_cluster(command: Command) -> None:
    with socket.create_server(("127.0.0.1", 0)) as gone:
        address = f"127.0.0.1:{gone.getsockname()[1]}"
    code, _, err = command("serve", "--port", 0, "--replicas", 2, "--ray-address", address)
    assert code == 2
    assert err.splitlines()[-1].startswith(
        f"pronk: error: ray-address: expected a Ray cluster at {address}, found none: "
    )
