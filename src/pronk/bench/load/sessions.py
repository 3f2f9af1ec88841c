"""What each server can do, found out before anything is measured: its model, and which fields it takes."""

from __future__ import annotations

from dataclasses import dataclass

from pronk.bench.load.answers import CUT_OFF, NO_STREAM, TIMED_OUT, AnswerError
from pronk.bench.load.client import Client
from pronk.bench.load.requests import OPTIONAL, Ask, Job, Server, make_body
from pronk.errors import OptionError

__all__ = ["Session", "open_session", "refusal"]

_KEYS = (401, 403)
_FIELDS = (400, 404, 422)  # what servers say to a field that they do not know; 404 to a model, or to the whole path


@dataclass(frozen=True)
class Session:
    """A server, ready to be measured.

    Attributes:
        server: what it is.
        model: whose answers are measured.
        without: optional fields that it refuses.
    """

    server: Server
    model: str
    without: tuple[str, ...] = ()

    def body(self, ask: Ask, job: Job, mark: str = "") -> bytes:
        """A request that it takes; see :func:`~pronk.bench.load.requests.make_body`."""
        return make_body(self.server, self.model, ask, job, mark, self.without)


async def open_session(client: Client, server: Server, ask: Ask, job: Job) -> Session:
    """Ask a server for its models and for one short answer; that is its first warm-up, too.

    Raises:
        OptionError: it cannot be measured; the message says why, and what to do.
    """
    models: list[str] = []
    try:
        models = await client.models(server)
    except AnswerError as error:
        if server.model is None or error.status is None or error.status in _KEYS:
            raise refusal(server, error) from error
    if server.model is None and not models:
        msg = f"server {server.name}: expected a model in {server.url}/models, found none; name one with --server-model"
        raise OptionError(msg)
    session = Session(server, server.model or models[0])
    try:
        return await _settle(client, session, ask, job)
    except AnswerError as error:
        raise refusal(server, error, session.model, models) from error


async def _settle(client: Client, session: Session, ask: Ask, job: Job) -> Session:
    """The session without the fields that the server refuses: as few as possible.

    Raises:
        AnswerError: it refuses the request without any of them, too; this is what it said to the whole one.
    """
    short = Ask(ask.endpoint, min(ask.max_tokens, 4), ask.temperature, ask.ignore_eos)
    first: AnswerError | None = None
    for without in ((), *((name,) for name in OPTIONAL), OPTIONAL):
        tried = Session(session.server, session.model, without)
        try:
            await client.ask(session.server, tried.body(short, job))
        except AnswerError as error:
            if error.status not in _FIELDS:
                raise
            first = first or error
        else:
            return tried
    assert first is not None
    raise first


def refusal(
    server: Server, error: AnswerError, model: str | None = None, models: list[str] | None = None
) -> OptionError:
    """Why a server cannot be measured, and what to do about it."""
    expected, advice = f"an OpenAI-compatible server at {server.url}", "start it, or check the address"
    if error.status in _KEYS:
        expected, advice = "a key that it accepts", "give it with --api-key"
    elif error.label == NO_STREAM:
        expected, advice = "a streamed answer", "only servers that stream can be measured"
    elif error.label == CUT_OFF:
        expected, advice = "a whole answer", "see what the server itself says of it"
    elif error.label == TIMED_OUT:
        advice = "start it, or give it more time with --timeout"
    elif error.status is not None and model is None:
        expected, advice = f"its models at {server.url}/models", "check the address, or name one with --server-model"
    elif error.status is not None:
        listed = f" (it lists {', '.join(models[:8])})" if models else ""
        expected, advice = f"an answer of the model {model}{listed}", "see --server-model, --endpoint, --extra-body"
    return OptionError(f"server {server.name}: expected {expected}, found {error}; {advice}")
