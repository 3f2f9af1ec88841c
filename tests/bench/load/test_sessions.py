"""What is found out about servers first, and what is said of those that cannot be measured."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from bench.load.fake_server import Fake, running
from pronk.bench.load.client import Client
from pronk.bench.load.requests import OPTIONAL, Ask, Job, Server
from pronk.bench.load.sessions import Session, open_session
from pronk.errors import OptionError

JOB = Job("t/1", ({"role": "user", "content": "Hello"},), 1)
EVERYTHING = Ask("completions", 20, 0.8, ignore_eos=True)


def session_of(fake: Fake, key: str | None = None, model: str | None = None, ask: Ask = EVERYTHING) -> Session:
    async def main() -> Session:
        async with Client(ask.endpoint, 5) as client:
            return await open_session(client, Server("it", f"{fake.url}/v1", key, model), ask, JOB)

    with running(fake):
        return asyncio.run(main())


def test_the_first_model_it_lists() -> None:
    session = session_of(Fake(models=("small", "large")))
    assert (session.model, session.without) == ("small", ())
    assert session_of(Fake(models=("small", "large")), model="large").model == "large"


@pytest.mark.parametrize(
    ("refuses", "without"),
    [
        (("stream_options",), ("stream_options",)),
        (("ignore_eos",), ("ignore_eos",)),
        (("seed",), ("seed",)),
        (("stream_options", "seed"), OPTIONAL),
    ],
)
def test_fields_that_it_refuses(refuses: tuple[str, ...], without: tuple[str, ...]) -> None:
    fake = Fake(refuses=refuses)
    assert session_of(fake).without == without
    assert not set(without) & set(fake.asked[-1])


def test_fields_that_nobody_asked_for_are_not_missed() -> None:
    fake = Fake(refuses=("ignore_eos", "seed"))
    assert session_of(fake, ask=Ask()).without == ()
    assert len(fake.asked) == 1


def test_a_model_that_is_named_needs_no_list() -> None:
    for models in ((), None):
        assert session_of(Fake(models=models), model="mine").model == "mine"


@pytest.mark.parametrize(
    ("fake", "given", "said"),
    [
        (Fake(key="x"), {}, "a key that it accepts, found HTTP 401: no such key; give it with --api-key"),
        (Fake(key="x"), {"key": "y"}, "a key that it accepts, found HTTP 401"),
        (Fake(key="x"), {"key": "y", "model": "tiny"}, "a key that it accepts, found HTTP 401"),
        (Fake(models=("a", "b")), {"model": "c"}, "the model c .it lists a, b., found HTTP 404: no model c; see"),
        (Fake(models=None), {}, "its models at .*, found HTTP 404: Not Found; .* name one with --server-model"),
        (Fake(models=()), {}, "a model in .*/v1/models, found none; name one with --server-model"),
        (Fake(html=True), {}, "an OpenAI-compatible server at .*, found not the protocol: .* no list of models"),
        (Fake(html=True), {"model": "tiny"}, "an OpenAI-compatible server"),
        (Fake(plain=True), {}, "a streamed answer, found no stream: .* found application/json"),
        (Fake(fails={0: 500}), {}, "an answer of the model tiny .*, found HTTP 500: busy"),
        (Fake(fails={0: 429}), {}, "found HTTP 429: busy"),
        (Fake(refuses=("max_tokens",)), {}, "found HTTP 422: Unexpected fields: .'max_tokens'."),
        (Fake(cuts=0), {}, "a whole answer, found cut off: .*; see what the server itself says of it"),
        (Fake(breaks=0), {}, "found error in the stream: out of memory"),
    ],
)
def test_servers_that_cannot_be_measured(fake: Fake, given: dict[str, Any], said: str) -> None:
    with pytest.raises(OptionError, match=f"^server it: expected .*{said}") as caught:
        session_of(fake, **given)
    assert "\n" not in str(caught.value)
    assert len(fake.asked) <= 5
