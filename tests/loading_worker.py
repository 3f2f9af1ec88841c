"""Process that loads model files and says how it went; the tests of hostile files start it.

It reads one JSON object a line with the fields of :class:`Request`, loads the model as
:class:`pronk.LLM` does, generates a few tokens, and answers with one line, ``{"outcome": …,
"message": …}``. The outcomes:

========  ==========================================================
loads     the model generates text
refused   an error of pronk, of one line
crashed   another exception, or a message of several lines
slow      the time limit has passed
========  ==========================================================

The memory of a case is limited. A signal ends the process, which the test notices.
"""

import json
import resource
import signal
import sys
import traceback
import warnings
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

from pronk import LLM, PronkError, SamplingParams

SECONDS = 10  # limit of the processor time of a case; a child process has a limit of its own
WAIT = 12 * SECONDS  # time limit of a case, also on a busy machine
_MEMORY = 1 << 30  # bytes that a case may allocate beyond the size of the model's files
_KV_MEMORY = 1 << 24  # bytes of the KV cache; its default is a share of the machine's memory
_PROMPT = [1, 2, 3, 4, 2, 1] * 8  # longer than a block of the KV cache
_TEXT = "Hello  wörld, 漢字 🙂\n\n" + "l" * 2000 + " " * 2000 + "x"


class Request(NamedTuple):
    """Files to load: a model, and perhaps an adapter, a drafter and a prompt cache."""

    model: str
    adapter: str | None = None
    drafter: str = "auto"
    prompt_cache: str | None = None


class _TooSlowError(BaseException):
    """The time limit has passed; no ``except Exception`` catches it."""


def _raise_too_slow(_signal: int, _frame: FrameType | None) -> None:
    raise _TooSlowError


def _limit_memory(model: Path) -> None:
    """Limit the address space to its present size, twice the model's files, and ``_MEMORY``."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    files = model.rglob("*") if model.is_dir() else [model]
    size = sum(file.stat().st_size for file in files if file.is_file())
    limit = pages * resource.getpagesize() + 2 * size + _MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))


def load(request: Request) -> None:
    """Load a model, generate a few tokens, and encode and decode a text."""
    llm = LLM(
        request.model,
        adapters=None if request.adapter is None else {"a": request.adapter},
        drafter=request.drafter,
        prompt_cache=request.prompt_cache,
        kv_memory=_KV_MEMORY,
        calibration=False,
    )
    try:
        adapter = None if request.adapter is None else "a"
        llm.generate(_PROMPT, SamplingParams(max_tokens=5), adapter=adapter)
        llm.tokenizer.decode(llm.tokenizer.encode(_TEXT))
    finally:
        llm.close()


def try_load(request: Request) -> dict[str, Any]:
    """Load a model and return the answer."""
    _limit_memory(Path(request.model))
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    signal.alarm(WAIT)
    try:
        load(request)
    except PronkError as error:
        message = str(error)
        is_one_line = message.isprintable() and 0 < len(message) < 2000
        return {
            "outcome": "refused" if is_one_line else "crashed",
            "message": f"{type(error).__name__}: {message}",
        }
    except _TooSlowError:
        return {"outcome": "slow", "message": traceback.format_exc()}
    except BaseException as error:  # noqa: BLE001 - reported as a crash
        return {
            "outcome": "crashed",
            "message": f"{type(error).__name__}: {error}\n{traceback.format_exc()}",
        }
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.alarm(0)
    return {"outcome": "loads", "message": ""}


def main() -> None:
    """Answer the cases of standard input."""
    warnings.simplefilter("ignore")
    signal.signal(signal.SIGPROF, _raise_too_slow)
    signal.signal(signal.SIGALRM, _raise_too_slow)
    answers = sys.stdout
    sys.stdout = sys.stderr
    for line in sys.stdin:
        answers.write(json.dumps(try_load(Request(**json.loads(line)))) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
