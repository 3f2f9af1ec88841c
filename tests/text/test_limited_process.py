"""No request gets the reply to another one, whatever interrupts or ends the child process."""

from __future__ import annotations

import copy
import json
import os
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from tokenizers import Regex, decoders, pre_tokenizers
from tokenizers import Tokenizer as Backend

from pronk.base.errors import ClosedError, TokenizerError
from pronk.testing import byte_tokenizer
from pronk.text.chat.template import Renderer
from pronk.text.guarded import GuardedTokenizer, load_backend
from pronk.text.limited_process import LimitedProcess
from pronk.text.tokenizer import Tokenizer
from waiting import HUNG

Action = Callable[[], None]
WORDS = ["alpha", "bravo", "charlie", "delta"]


def unknown_backend() -> Backend:
    """Return a tokenizer that encodes and decodes in child processes."""
    backend = byte_tokenizer()
    split = pre_tokenizers.Split(Regex("x{3}"), "isolated")
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(False, use_regex=False)]
    )
    backend.decoder = decoders.Sequence(
        [decoders.ByteLevel(), decoders.Replace(Regex("x{3}"), "y")]
    )
    return backend


class User(NamedTuple):
    """A user of a limited process: a function of a text, and its expected values."""

    process: LimitedProcess
    convert: Callable[[str], Any]
    expected: dict[str, Any]


def rendering() -> User:
    renderer = Renderer(seconds=HUNG)

    def render(text: str) -> Any:
        return renderer.ask("<{{ x }}>", {"x": text})["text"]

    return User(renderer._process, render, {word: f"<{word}>" for word in WORDS})


def encoding() -> User:
    backend = unknown_backend()
    tokenizer = load_backend(backend.to_str())
    assert isinstance(tokenizer, GuardedTokenizer)
    expected = {word: backend.encode(word).ids for word in WORDS}
    return User(tokenizer._encoder, lambda text: tokenizer.encode(text).ids, expected)


def decoding() -> User:
    backend = unknown_backend()
    tokenizer = load_backend(backend.to_str())
    assert isinstance(tokenizer, GuardedTokenizer)
    words = {word: backend.decode(backend.encode(word).ids) for word in WORDS}
    return User(tokenizer._decoder, lambda text: tokenizer.decode(backend.encode(text).ids), words)


USERS = {"template": rendering, "encoder": encoding, "decoder": decoding}


@pytest.fixture(params=USERS.values(), ids=USERS)
def user(request: pytest.FixtureRequest) -> Iterator[User]:
    made: User = request.param()
    yield made
    made.process.close()


def check(user: User) -> None:
    """Check that requests get their own replies."""
    assert {word: user.convert(word) for word in WORDS} == user.expected


class Pipe:
    """A pipe of a child process with an action at a call of a method, before or after the pipe's
    own method.
    """

    def __init__(
        self, pipe: Any, method: str, action: Action, *, skipped: int = 0, late: bool = False
    ) -> None:
        self.pipe = pipe
        self.method = method
        self.action = action
        self.calls_left = skipped
        self.late = late

    def __getattr__(self, name: str) -> Any:
        if name != self.method or self.calls_left < 0:
            return getattr(self.pipe, name)
        self.calls_left -= 1
        if self.calls_left >= 0:
            return getattr(self.pipe, name)

        def call(*values: Any) -> Any:
            if not self.late:
                self.action()
            result = getattr(self.pipe, name)(*values)
            if self.late:
                self.action()
            return result

        return call


def interrupt() -> None:
    raise KeyboardInterrupt


@pytest.mark.few(6)
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize(
    ("pipe", "method"), [("stdin", "write"), ("stdin", "flush"), ("stdout", "readline")]
)
def test_the_next_request_after_an_interrupted_one(
    user: User, pipe: str, method: str, late: bool
) -> None:
    check(user)
    child = user.process._child
    setattr(child, pipe, Pipe(getattr(child, pipe), method, interrupt, late=late))
    with pytest.raises(KeyboardInterrupt):
        user.convert("other")
    assert user.process._child is None
    check(user)


@pytest.mark.parametrize("skipped", [0, 1])
def test_an_interrupt_while_the_process_starts(
    user: User, skipped: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first line is ``ready``, the second one the reply to the setup or to the request."""
    user.process.close()
    started = list[subprocess.Popen[bytes]]()
    original = subprocess.Popen

    def start(*values: Any, **options: Any) -> Any:
        child = original(*values, **options)
        started.append(child)
        if len(started) == 1:
            child.stdout = Pipe(child.stdout, "readline", interrupt, skipped=skipped)  # type: ignore[assignment]
        return child

    monkeypatch.setattr(subprocess, "Popen", start)
    with pytest.raises(KeyboardInterrupt):
        user.convert("other")
    assert started[0].returncode is not None
    check(user)


def test_a_reply_to_another_request_is_not_taken(user: User) -> None:
    check(user)
    child = user.process._child
    assert child is not None
    assert child.stdin is not None
    child.stdin.write(b"1000000 1.0 {}\n")
    check(user)


@pytest.mark.few(9)
@pytest.mark.skipif(sys.platform == "win32", reason="a process does not tell why it ended")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("moment", ["between", "write", "readline"])
def test_a_process_that_is_ended_from_outside_is_replaced(
    user: User, moment: str, number: int
) -> None:
    check(user)
    child = user.process._child
    assert child is not None

    def end() -> None:
        os.kill(child.pid, number)

    if moment == "between":
        end()
    elif moment == "write":
        child.stdin = Pipe(child.stdin, "write", end)  # type: ignore[assignment]
    else:
        child.stdout = Pipe(child.stdout, "readline", end)  # type: ignore[assignment]
    check(user)


@pytest.mark.skipif(sys.platform == "win32", reason="a process does not tell why it ended")
def test_a_process_that_is_always_ended_from_outside(
    user: User, monkeypatch: pytest.MonkeyPatch
) -> None:
    user.process.close()
    original = subprocess.Popen

    def start(*values: Any, **options: Any) -> Any:
        child = original(*values, **options)

        def end() -> None:
            child.kill()
            child.wait()

        child.stdin = Pipe(child.stdin, "write", end)  # type: ignore[assignment]
        return child

    with monkeypatch.context() as patched:
        patched.setattr(subprocess, "Popen", start)
        with pytest.raises(
            TokenizerError, match="expected the child process to answer, found that it was ended"
        ):
            user.convert("alpha")
    check(user)


@pytest.mark.few(2)
@pytest.mark.parametrize("method", ["write", "readline"])
def test_a_stopped_process(user: User, method: str) -> None:
    """The request in progress fails; the next one starts another process."""
    check(user)
    child = user.process._child
    assert child is not None
    if method == "write":
        child.stdin = Pipe(child.stdin, "write", user.process.stop)  # type: ignore[assignment]
    else:
        child.stdout = Pipe(child.stdout, "readline", user.process.stop)  # type: ignore[assignment]
    with pytest.raises(ClosedError):
        user.convert("other")
    check(user)
    user.process.stop()
    assert user.process._child is None
    assert child.returncode is not None
    check(user)


class AnnouncedLock:
    """A lock with an event at which a thread begins to wait for it."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.is_waiting = threading.Event()

    def __enter__(self) -> None:
        self.is_waiting.set()
        self.lock.acquire()

    def __exit__(self, *_: object) -> None:
        self.lock.release()

    def acquire(self, *, blocking: bool) -> bool:
        return self.lock.acquire(blocking=blocking)

    def release(self) -> None:
        self.lock.release()


def test_waiting_requests_of_a_stopped_process(user: User) -> None:
    check(user)
    lock = AnnouncedLock()
    user.process._lock = lock  # type: ignore[assignment]
    lock.lock.acquire()
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(user.convert, "alpha")
        assert lock.is_waiting.wait(HUNG)
        user.process.stop()
        lock.lock.release()
        with pytest.raises(ClosedError):
            waiting.result(HUNG)
    check(user)


def test_a_tokenizer_is_stopped() -> None:
    for backend in (unknown_backend(), byte_tokenizer()):
        tokenizer = Tokenizer(load_backend(backend.to_str()))
        ids = tokenizer.encode("alpha")
        tokenizer.stop()
        assert tokenizer.encode("alpha") == ids


def pickled(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value))


@pytest.mark.parametrize("make", [copy.copy, copy.deepcopy, pickled])
def test_copies_have_processes_of_their_own(make: Callable[[Any], Any]) -> None:
    backend = unknown_backend()
    original = load_backend(backend.to_str())
    tokenizer = Tokenizer(original, chat_template="{{ messages[0].content }}")
    messages = [{"role": "user", "content": "bravo"}]
    assert tokenizer.chat(messages) == "bravo"
    for each in (make(original), make(tokenizer).backend):
        original.encode("alpha")
        assert each.encode("bravo").ids == backend.encode("bravo").ids
        assert each.decode(backend.encode("charlie").ids) == "charlie"
    assert make(tokenizer).chat(messages) == "bravo"


def test_an_incomplete_copy_fails_plainly() -> None:
    for kind in (GuardedTokenizer, LimitedProcess):
        made: Any = kind.__new__(kind)
        with pytest.raises(AttributeError):
            _ = made.backend
        del made


PROGRAM = """
import json, time
def answer(line):
    request = json.loads(line)
    time.sleep(request.get("sleeps", 0))
    while request.get("works"):
        pass
    return json.dumps(request).encode()
"""


@pytest.mark.skipif(sys.platform == "win32", reason="the system has no timer of processor time")
def test_processor_time_is_limited(tmp_path: Path) -> None:
    """A process that waits, as on a busy machine, goes on; one that works beyond the limit ends."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM, encoding="utf-8")
    process = LimitedProcess(program, purpose="test", needs="json", seconds=HUNG, memory=2**30)
    waits = json.dumps({"sleeps": 0.3}).encode()
    reply = process.ask(waits, 0.2)
    assert reply is not None
    assert reply.line == waits
    assert reply.seconds < 0.2
    assert process.ask(json.dumps({"works": True}).encode(), 0.1) is None
    assert process.ask(waits) is not None
    process.close()
