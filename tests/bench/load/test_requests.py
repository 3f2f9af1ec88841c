"""Servers as users name them, and what they are asked."""

from __future__ import annotations

import json
from collections import Counter

import pytest

from pronk.bench.load.requests import OPTIONAL, Ask, Job, Server, make_body, make_jobs, parse_servers
from pronk.bench.prompts import Prompt
from pronk.errors import OptionError

HERE = "http://localhost:8000"
JOB = Job("t/1", ({"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}), 9)


def test_addresses() -> None:
    servers = parse_servers([HERE, f"b={HERE}/v1/", "c=https://example.com/api"], [], [], [])
    assert [(server.name, server.url) for server in servers] == [
        ("localhost:8000", f"{HERE}/v1"),
        ("b", f"{HERE}/v1"),
        ("c", "https://example.com/api/v1"),
    ]


def test_values_for_all_and_for_one() -> None:
    a, b = parse_servers(
        [f"a={HERE}", f"b={HERE}"],
        ["secret==", "b=other"],
        ["org/model=4"],
        ['a={"drafter": "autoregressive"}', '{"top_k": 1}'],
    )
    assert (a.key, a.model, a.extra) == ("secret==", "org/model=4", {"drafter": "autoregressive"})
    assert (b.key, b.model, b.extra) == ("other", "org/model=4", {"top_k": 1})
    assert "secret" not in repr(a)


@pytest.mark.parametrize(
    ("servers", "keys", "models", "extras", "found"),
    [
        (["localhost:8000"], [], [], [], r"server: .*\[NAME=\]URL.*'localhost:8000'"),
        (["ftp://x"], [], [], [], "server: .*'ftp://x'"),
        (["http://"], [], [], [], "server: .*'http://'"),
        ([f"{HERE}?key=1"], [], [], [], "server"),
        (["http://me:pass@host"], [], [], [], "without a password, found one for host"),
        ([HERE, HERE], [], [], [], "names that differ"),
        ([f"a={HERE}"], ["x", "y"], [], [], "api-key: .*twice"),
        ([f"a={HERE}"], ["a=x", "a=y"], [], [], "api-key: .*twice"),
        ([f"a={HERE}"], ["two\nlines"], [], [], "api-key: expected printable ASCII"),
        ([f"a={HERE}"], [], [], ["[1]"], "extra-body"),
        ([f"a={HERE}"], [], [], ["a={"], "extra-body"),
    ],
)
def test_mistakes(servers: list[str], keys: list[str], models: list[str], extras: list[str], found: str) -> None:
    with pytest.raises(OptionError, match=found) as caught:
        parse_servers(servers, keys, models, extras)
    assert "pass@" not in str(caught.value)


def body_of(ask: Ask, **more: object) -> dict[str, object]:
    found: dict[str, object] = json.loads(make_body(Server("a", HERE), "m", ask, JOB, **more))  # type: ignore[arg-type]
    return found


def test_a_conversation() -> None:
    assert body_of(Ask(max_tokens=5)) == {
        "model": "m",
        "messages": list(JOB.messages),
        "max_tokens": 5,
        "temperature": 0.0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def test_a_text_drawn_without_end() -> None:
    ask = Ask("completions", 5, 0.8, ignore_eos=True)
    found = body_of(ask, mark="[1]\n")
    assert found["prompt"] == "[1]\nBe brief.\n\nHi"
    assert (found["seed"], found["ignore_eos"]) == (9, True)
    assert "messages" not in found
    assert not {*OPTIONAL} & {*body_of(ask, without=OPTIONAL)}


def test_extra_fields_come_last() -> None:
    server = Server("a", HERE, extra={"max_tokens": 2, "drafter": "jacobi"})
    found = json.loads(make_body(server, "m", Ask(max_tokens=5), JOB))
    assert (found["max_tokens"], found["drafter"]) == (2, "jacobi")


def test_jobs_are_the_prompts_again_and_again() -> None:
    prompts = [Prompt("a", "t", text="A"), Prompt("b", "t", turns=("B", "C")), Prompt("c", "t", text="D")]
    jobs = make_jobs(prompts, 7, 3, 0.8)
    assert sorted(Counter(job.id for job in jobs).values()) == [2, 2, 3]
    assert [job.id for job in jobs[:3]] == [job.id for job in jobs[3:6]]
    assert [job.seed for job in jobs] == list(range(3, 10))
    assert {job.id: job.messages[-1]["content"] for job in jobs} == {"t/a": "A", "t/b": "B", "t/c": "D"}
    assert jobs == make_jobs(prompts, 7, 3, 0.8)
