"""The command line, from outside: what goes to which stream, exit codes, and that no mistake ends
in a traceback.
"""

from __future__ import annotations

import inspect
import json
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from pkgutil import resolve_name
from types import SimpleNamespace
from typing import Any

import pytest
import typer

import pronk.llm
from checkpoints import MakeCheckpoint
from command_line import Command as Run
from command_line import assert_mistake
from pronk.base.errors import CacheFullError, TokenizerError
from pronk.checkpoint.hub.clone_models import tiny_model
from pronk.cli.main import _all_commands, main
from pronk.cli.options import sampling_params
from pronk.cli.repl import ChatSession
from pronk.engine.outputs import Completion, Piece
from pronk.engine.stats import Stats, StepStats
from pronk.sampling.params import SamplingParams
from pronk.text.chat.answers import AnswerFormat
from text.chat.tool_templates import thinking_tokenizer, tool_tokenizer
from waiting import HUNG

SEED = 11


class FakeLLM:
    """Answers with a fixed text whose every second token is an accepted draft token; keeps its
    prompts.
    """

    made: FakeLLM
    kernels = "avx2"
    answer: Sequence[str] = ("one", " two", " three")
    answer_format = AnswerFormat(tool_tokenizer("hermes"))  # a model without thoughts

    def __init__(self, model: str | None = None, **options: Any) -> None:
        self.model = model
        self.options = options
        self.adapters = tuple(options["adapters"])
        self.config = SimpleNamespace(context=1000, sampling={})
        self.request_factory = SimpleNamespace(
            encode_prompt=lambda text: text,
            encode_infill=lambda prefix, suffix: f"{prefix}|{suffix}",
            end_infill=lambda params: replace(params, stop_token_ids=(7,)),
            answer_format=self.answer_format,
        )
        self.calibration = SimpleNamespace(save=lambda: None)
        self.words = [*self.answer]
        self.error: BaseException | None = None
        self.asked: list[Any] = []
        self.used: list[tuple[SamplingParams, Any]] = []
        FakeLLM.made = self
        if options["progress"]:
            options["progress"](5, 10)

    def generate(
        self, prompt: str, params: SamplingParams, *, adapter: str | None = None
    ) -> Completion:
        *_, last = self.stream(prompt, params, adapter=adapter)
        assert last.completion is not None
        return last.completion

    def stream(
        self, prompt: Any, params: SamplingParams, *, adapter: str | None = None
    ) -> Iterator[Piece]:
        self.asked.append(prompt)
        self.adapter = adapter
        return self._stream(params)

    def _stream(self, params: SamplingParams) -> Iterator[Piece]:
        for index in range(params.n):
            for i, word in enumerate(self.words):
                if self.error is not None and i == 2:
                    raise self.error
                done = self._complete() if i == len(self.words) - 1 else None
                yield Piece(
                    i, word, source="suffix" if i % 2 else None, index=index, completion=done
                )

    def _complete(self) -> Completion:
        steps = [StepStats(1, 0, 0, 0, 1, 0.0, 0.1, 0.2), StepStats(5, 4, 4, 1, 2, 0.0, 0.2, 0.4)]
        stats = Stats(2, len(self.words), total_seconds=0.5, steps=steps)
        text = "".join(self.words)
        return Completion(text, [0, 1, 2], "stop", None, SEED, [8, 9], [{0: -0.5}], None, stats)

    def stream_chat(
        self,
        messages: Sequence[Mapping[str, str]],
        params: SamplingParams,
        *,
        adapter: str | None = None,
        template_options: Any = None,
    ) -> Iterator[Piece]:
        self.used.append((params, template_options))
        return self.stream([dict(message) for message in messages], params, adapter=adapter)

    def chat_ids(
        self, messages: Sequence[Mapping[str, str]], *, template_options: Any = None
    ) -> list[int]:
        return [0] * (100 * len(messages))


@pytest.fixture
def run(command: Run) -> Run:
    return command


def test_max_tokens_beyond_the_context(run: Run, fake: type[FakeLLM]) -> None:
    code, out, err = run("generate", "x" * 900, "--max-tokens", "101")
    assert (code, out) == (0, "one two three\n")
    assert err == "max_tokens: 100 instead of 101, the rest of the model's context\n"


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> type[FakeLLM]:
    monkeypatch.setattr(pronk.llm, "LLM", FakeLLM)
    return FakeLLM


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let rich believe that both streams are terminals."""
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")


def test_help_version_and_no_arguments(run: Run) -> None:
    code, out, _ = run("--help")
    assert code == 0
    assert all(word in out for word in ("generate", "chat", "pull"))
    assert run()[:2] == (code, out)
    assert run("--version")[:2] == (0, f"pronk {pronk.__version__}\n")


@pytest.mark.parametrize("name", _all_commands())
def test_summary_of_a_command_is_the_first_line_of_its_help(run: Run, name: str) -> None:
    """The summaries are written twice, so that ``--help`` imports no command."""
    known = _all_commands()[name]
    command = resolve_name(known.home)
    text = command.info.help if isinstance(command, typer.Typer) else inspect.getdoc(command)
    assert text.partition("\n")[0] == known.summary
    assert f"pronk {name}" in run(name, "--help")[1].splitlines()[1]


def test_every_sampling_parameter_is_an_option_with_the_same_default() -> None:
    options = inspect.signature(sampling_params).parameters
    guides = ["json_schema", "regex", "choice", "grammar"]
    own = [[f.name] if f.name != "guide" else guides for f in fields(SamplingParams) if f.init]
    assert list(options) == [name for names in own for name in names]
    assert sampling_params() == SamplingParams()


def test_options_reach_the_library(
    run: Run, fake: type[FakeLLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[SamplingParams] = []
    monkeypatch.setattr(fake, "_stream", lambda _, params: seen.append(params) or iter([]))
    args = """
        --model m --drafter autoregressive --device cpu --dtype float32 --kv-memory 1GiB --threads 1 --budget all
        --context 128 --kernels portable --bits portable --weights int8 --kv-dtype int8 --calibration off --weight-cache packed
        --weight-cache-size 2GiB
        --adapter sql=folder=1 --prompt-cache prompts --prompt-cache-size 1GiB
        --max-tokens 9 --min-tokens 1 --temperature 0.5 --top-k 3 --top-p 0.9 --min-p 0.1 --repetition-penalty 1.1
        --presence-penalty 0.2 --frequency-penalty -0.3 --logit-bias 7=1.5 --logit-bias 8=-100 --ignore-eos --seed 3
        --n 2 --logprobs 4 --prompt-logprobs 5 --stop-token-ids 1 --stop-token-ids 2 --bad-words no --rule rejection
    """
    assert run("generate", "x", *args.split(), "--stop", "\n\n", "--stop", "def ")[0] == 0
    assert seen == [
        SamplingParams(
            max_tokens=9, min_tokens=1, temperature=0.5, top_k=3, top_p=0.9, min_p=0.1, repetition_penalty=1.1,
            presence_penalty=0.2, frequency_penalty=-0.3, logit_bias={7: 1.5, 8: -100.0}, bad_words=("no",),
            stop=("\n\n", "def "), stop_token_ids=(1, 2), ignore_eos=True, seed=3, rule="rejection", n=2, logprobs=4,
            prompt_logprobs=5,
        )
    ]  # fmt: skip
    made = fake.made
    del made.options["check"]  # a function; test_requests_that_do_not_fit tests it
    expected = {
        "drafter": "autoregressive",
        "max_tree": 128,
        "device": "cpu",
        "dtype": "float32",
        "context": 128,
        "kv_memory": "1GiB",
        "threads": 1,
        "workers": 1,
        "parallel": "tree",
    }
    expected |= {
        "weights": "int8",
        "weight_cache": "packed",
        "weight_cache_size": "2GiB",
        "adapters": {"sql": "folder=1"},
        "prompt_cache": "prompts",
        "prompt_cache_size": "1GiB",
        "kv_dtype": "int8",
        "kernels": "portable",
        "bits": "portable",
        "calibration": False,
        "budget": "all",
        "progress": None,
    }
    assert (made.model, made.options) == ("m", expected)


# pronk generate


def test_piped_output_is_the_text_alone(run: Run, fake: type[FakeLLM]) -> None:
    assert run("generate", "x") == (0, "one two three\n", "")
    assert fake.made.asked == ["x"]


def test_stats_and_echo_can_be_asked_for(run: Run, fake: type[FakeLLM]) -> None:
    figures = (
        "3 tokens · 6.0 tokens/s · 1.50 tokens per forward pass · 1 of 4 draft tokens accepted · "
        "kernels avx2"
    )
    assert run("generate", "x =", "--stats", "--echo") == (0, "x =one two three\n", f"{figures}\n")
    assert (
        run("generate", "x", "--stats", "--temperature", "0.8")[2] == f"{figures} · seed {SEED}\n"
    )


@pytest.mark.parametrize("text", ["def f():\n", "", "zwei\r\nZeilen ü 🙂"])
def test_prompt_is_read_verbatim(run: Run, fake: type[FakeLLM], tmp_path: Path, text: str) -> None:
    path = tmp_path / "prompt.txt"
    path.write_bytes(text.encode())
    for args in (("--prompt-file", str(path)), ("-",), ("--prompt-file", "-")):
        assert run("generate", *args, given=text)[0] == 0
        assert fake.made.asked == [text]


def test_a_prediction_is_read_from_a_file(
    run: Run, fake: type[FakeLLM], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    seen: list[SamplingParams] = []
    monkeypatch.setattr(fake, "_stream", lambda _, params: seen.append(params) or iter([]))
    path = tmp_path / "main.py"
    path.write_text("def f():\n")
    assert run("generate", "x", "--prediction", str(path))[0] == 0
    assert [params.prediction for params in seen] == ["def f():\n"]
    missing = str(tmp_path / "missing")
    expected = f"prediction: expected a file that can be read at {missing}"
    assert_mistake(run("generate", "x", "--prediction", missing), expected)


def test_a_suffix_fills_in_the_middle(run: Run, fake: type[FakeLLM]) -> None:
    assert run("generate", "x", "--suffix", "y") == (0, "one two three\n", "")
    assert fake.made.asked == ["x|y"]


def test_a_suffix_needs_a_model_for_code(run: Run) -> None:
    result = run("generate", "x", "--suffix", "y", "--model", str(tiny_model()))
    assert_mistake(result, "suffix: expected a model with tokens for filling in the middle")


def test_json_is_one_object_with_the_fields_of_the_result(run: Run, fake: type[FakeLLM]) -> None:
    code, out, err = run("generate", "x", "--json", "--logprobs", "1")
    assert (code, err) == (0, "")
    result = json.loads(out)
    assert set(result) == {f.name for f in fields(Completion)}
    assert result["text"] == "one two three"
    assert result["logprobs"] == [{"0": -0.5}]
    assert result["stats"]["step_compression"] == 1.5


def test_further_samples_follow_the_first(run: Run, fake: type[FakeLLM]) -> None:
    _, out, err = run("generate", "x", "--n", "2", "--stats")
    assert out == "one two three\n--- sample 2 of 2 ---\none two three\n"
    assert err.count("\n") == 2


@pytest.mark.usefixtures("terminal")
def test_terminal_shows_figures_colours_and_no_control_characters(
    run: Run, fake: type[FakeLLM]
) -> None:
    _, out, err = run("generate", "x", "--color-drafts")
    assert out == "one\x1b[32m two\x1b[0m three\n"
    assert "loading" in err
    assert "1.50 tokens per forward pass" in err
    assert "\x1b[32m" not in run("generate", "x")[1]

    fake.made.words[0] = "\x1b]0;title\x07\x9b2J"
    assert run("generate", "\x1b[2J\tx", "--echo")[1].count("\ufffd") == 1


def test_an_interrupt_keeps_the_printed_text(
    run: Run, fake: type[FakeLLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupt_third_token(fake, monkeypatch)
    assert run("generate", "x") == (130, "one two\n", "interrupted\n")
    assert run("generate", "x", "--json") == (130, "", "interrupted\n")


def interrupt_third_token(fake: type[FakeLLM], monkeypatch: pytest.MonkeyPatch) -> None:
    original = fake.__init__

    def init(self: FakeLLM, *args: Any, **options: Any) -> None:
        original(self, *args, **options)
        self.error = KeyboardInterrupt()

    monkeypatch.setattr(fake, "__init__", init)


def test_real_interrupt_of_a_process() -> None:
    program = """
import time, pronk.llm, pronk.cli.main
from types import SimpleNamespace
from pronk.engine.outputs import Piece
class Slow:
    kernels, adapters = "avx2", ()
    config = SimpleNamespace(context=1000, sampling={})
    request_factory = SimpleNamespace(encode_prompt=lambda text: text)
    def __init__(self, *_, **__): self.calibration = SimpleNamespace(save=lambda: None)
    def stream(self, prompt, params, adapter):
        while True:
            yield Piece(0, "tick ")
            time.sleep(0.01)
pronk.llm.LLM = Slow
pronk.cli.main.main(["generate", "x"])
"""
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        start = process.stdout.read(5)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=HUNG)
    assert process.returncode == 130
    assert re.fullmatch(rb"(tick )+\n", start + out)
    assert err == b"interrupted\n"


def test_closed_pipe_is_silent() -> None:
    command = (
        f"'{sys.executable}' -c 'from pronk.cli.main import main; main()' generate --help | true"
    )
    result = subprocess.run(
        command, shell=True, capture_output=True, text=True, timeout=HUNG, check=False
    )
    assert result.stderr == ""


# pronk chat


def test_piped_chat_keeps_the_conversation(run: Run, fake: type[FakeLLM]) -> None:
    code, out, err = run("chat", given="Hello\n\n  And?  \n")
    assert (code, out, err) == (0, "one two three\none two three\n", "")
    hello = [{"role": "user", "content": "Hello"}]
    answer = [{"role": "assistant", "content": "one two three"}]
    assert fake.made.asked == [hello, [*hello, *answer, {"role": "user", "content": "And?"}]]


def test_a_byte_order_mark_in_piped_text_is_ignored(run: Run, fake: type[FakeLLM]) -> None:
    assert run("chat", given=b"\xef\xbb\xbfHello\n")[0] == 0
    assert fake.made.asked == [[{"role": "user", "content": "Hello"}]]
    assert run("generate", "-", given=b"\xef\xbb\xbfHello")[0] == 0
    assert fake.made.asked == ["Hello"]


def test_chat_commands(run: Run, fake: type[FakeLLM]) -> None:
    code, out, err = run(
        "chat", given="a\nb\n/stats\n/reset\nc\n/colors\n/foo bar\n/help\n/exit\nd\n"
    )
    assert (code, out) == (0, "one two three\n" * 3)
    assert [len(messages) for messages in fake.made.asked] == [1, 3, 1]
    figures = (
        "6 tokens · 6.0 tokens/s · 1.50 tokens per forward pass · 2 of 8 draft tokens accepted · "
        "kernels avx2"
    )
    assert f"{figures}\n" in err
    assert "draft tokens are not coloured" in err
    assert "/foo: expected a command, found an unknown one; /help lists the commands" in err
    assert all(name in err for name in ("/help", "/reset", "/stats", "/colors", "/exit"))


def test_chat_repeats_and_forgets_turns(run: Run, fake: type[FakeLLM]) -> None:
    code, out, err = run("chat", given="/retry\na\nb\n/retry\n/undo\nc\n")
    assert (code, out) == (0, "one two three\n" * 4)
    asked = [[each["content"] for each in messages] for messages in fake.made.asked]
    turn = ["a", "one two three"]
    assert asked == [["a"], [*turn, "b"], [*turn, "b"], [*turn, "c"]]
    assert "/retry: expected an earlier message, found none; write one" in err
    assert "forgot: b\n" in err


def test_chat_sets_sampling_options(
    run: Run, fake: type[FakeLLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    used: list[SamplingParams] = []
    original = fake.stream_chat

    def record(
        self: FakeLLM, messages: Any, params: SamplingParams, **options: Any
    ) -> Iterator[Piece]:
        used.append(params)
        return original(self, messages, params, **options)

    monkeypatch.setattr(fake, "stream_chat", record)
    given = "/set temperature 0.5\n/set top_k x\n/set nosuch 1\n/set\na\n"
    code, _, err = run("chat", given=given)
    assert (code, used[0].temperature, used[0].top_k) == (0, 0.5, SamplingParams().top_k)
    assert "/set: expected one of max_tokens, temperature" in err
    assert "found 'x'" in err
    assert "temperature 0.5, top_k" in err


def test_chat_switches_the_model(run: Run, fake: type[FakeLLM]) -> None:
    code, out, err = run("chat", given="a\n/model\n/model other\nb\n")
    assert (code, out) == (0, "one two three\n" * 2)
    assert "/model: expected the name or path of a model, found none" in err
    assert "model: other" in err
    assert [each["content"] for each in fake.made.asked[-1]] == ["a", "one two three", "b"]
    assert len(fake.made.asked) == 1


def test_run_is_chat_with_the_named_model(run: Run, fake: type[FakeLLM]) -> None:
    assert run("run", ".", given="a\n") == (0, "one two three\n", "")
    assert fake.made.asked == [[{"role": "user", "content": "a"}]]


@pytest.mark.usefixtures("terminal")
def test_chat_colours_draft_tokens_unless_turned_off(run: Run, fake: type[FakeLLM]) -> None:
    _, out, err = run("chat", given="a\n/colors\nb\n")
    assert out == "one\x1b[32m two\x1b[0m three\none two three\n"
    assert err.count("1.50 tokens per forward pass") == 2
    assert "\x1b[32m" not in run("chat", "--no-color-drafts", given="a\n")[1]


@pytest.fixture
def thinking(fake: type[FakeLLM], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        fake, "answer_format", AnswerFormat(thinking_tokenizer("hermes", tokens=False))
    )
    monkeypatch.setattr(fake, "answer", ["<think>", "\n2 +", " 3", ".\n</think>\n\nIt", " is"])


@pytest.mark.usefixtures("terminal", "thinking")
def test_chat_shows_thoughts_dimmed_and_apart(run: Run) -> None:
    assert (
        run("chat", given="a\n")[1]
        == "\x1b[2;32m2\x1b[0m\x1b[2;32m +\x1b[0m\x1b[2m 3\x1b[0m\x1b[2;32m.\x1b[0m"
        "\n\n\x1b[32mIt\x1b[0m is\n"
    )


@pytest.mark.usefixtures("thinking")
def test_piped_thoughts_are_between_tags_and_not_sent_back(run: Run, fake: type[FakeLLM]) -> None:
    assert run("chat", given="a\nb\n") == (0, "<think>\n2 + 3.\n</think>\n\nIt is\n" * 2, "")
    assert fake.made.asked[1][1] == {"role": "assistant", "content": "It is"}


@pytest.mark.usefixtures("thinking")
def test_interrupted_thoughts_are_ended(
    run: Run, fake: type[FakeLLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupt_third_token(fake, monkeypatch)
    assert run("chat", given="a\nb\n") == (0, "<think>\n2 +\n</think>\n" * 2, "stopped\nstopped\n")
    assert fake.made.asked[1][1] == {"role": "assistant", "content": ""}


def test_long_chat_forgets_its_oldest_turns(run: Run, fake: type[FakeLLM]) -> None:
    code, _, err = run("chat", "--max-tokens", "500", given="a\nb\nc\nd\n")
    assert code == 0
    # 100 tokens each; 500 fit
    assert [len(messages) for messages in fake.made.asked] == [1, 3, 5, 5]
    assert fake.made.asked[-1][0] == {"role": "user", "content": "b"}
    assert err == "the context is full: forgot the oldest 1 of 3 turns\n"


def test_interrupted_answer_stays_in_the_chat(
    run: Run, fake: type[FakeLLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupt_third_token(fake, monkeypatch)
    code, out, err = run("chat", given="a\nb\n")
    assert (code, out, err) == (0, "one two\none two\n", "stopped\nstopped\n")
    assert fake.made.asked[1][1] == {"role": "assistant", "content": "one two"}


def test_chat_goes_on_after_an_error(
    run: Run, fake: type[FakeLLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    original = fake.stream_chat

    def refuse_first(
        self: FakeLLM, messages: Any, params: SamplingParams, **options: Any
    ) -> Iterator[Piece]:
        if messages[-1]["content"] == "a":
            raise CacheFullError("no room")
        return original(self, messages, params, **options)

    monkeypatch.setattr(fake, "stream_chat", refuse_first)
    assert run("chat", given="a\nb\n") == (0, "one two three\n", "error: no room\n")
    assert fake.made.asked == [[{"role": "user", "content": "b"}]]


def test_chat_uses_the_models_sampling_unless_told_otherwise(run: Run, fake: type[FakeLLM]) -> None:
    used: list[SamplingParams] = []

    class Recommending(fake):  # type: ignore[valid-type,misc]
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            self.config.sampling = {"temperature": 0.7, "top_p": 0.8}

        def stream_chat(
            self, messages: Any, params: SamplingParams, **options: Any
        ) -> Iterator[Piece]:
            used.append(params)
            return super().stream_chat(messages, params, **options)

    pronk.llm.LLM = Recommending  # type: ignore[misc]  # the fixture restores it
    run("chat", given="a\n")
    run("chat", "--temperature", "0", "--max-tokens", "7", given="a\n")
    run("chat", "--max-tokens", "5000", given="a\n")
    assert [(params.temperature, params.top_p, params.max_tokens) for params in used] == [
        (0.7, 0.8, 500),  # half the context
        (0.0, 0.8, 7),
        (0.7, 0.8, 999),
    ]
    assert "max_tokens: 999 instead of 5000" in run("chat", "--max-tokens", "5000", given="")[2]


@pytest.mark.parametrize(
    ("given", "options", "budget"),
    [
        ((), {}, None),
        (("--thinking", "--thinking-budget", "9"), {"enable_thinking": True, "thinking": True}, 9),
        (("--no-thinking",), {"enable_thinking": False, "thinking": False}, None),
    ],
)
def test_chat_switches_thinking(
    run: Run,
    fake: type[FakeLLM],
    given: Sequence[str],
    options: dict[str, bool],
    budget: int | None,
) -> None:
    run("chat", *given, given="a\n")
    assert [(params.thinking_budget, used) for params, used in fake.made.used] == [
        (budget, options)
    ]


def test_chat_with_a_system_message(run: Run, fake: type[FakeLLM]) -> None:
    _, _, err = run("chat", "--system", "be brief", given="a\n/system\n/system be long\nb\n")
    assert [messages[0]["content"] for messages in fake.made.asked] == ["be brief", "be long"]
    assert [len(messages) for messages in fake.made.asked] == [2, 4]
    assert "system: be brief\nsystem: be long\n" in err


@pytest.mark.parametrize("given", ['"""a\n\n/b\n"""\n', '"""\na\n\n/b"""\n', '"""a\n\n/b'])
def test_chat_messages_of_several_lines(given: str, run: Run, fake: type[FakeLLM]) -> None:
    assert run("chat", given=given)[0] == 0
    assert fake.made.asked == [[{"role": "user", "content": "a\n\n/b"}]]


def test_chats_are_saved_and_continued(run: Run, fake: type[FakeLLM], tmp_path: Path) -> None:
    file = tmp_path / "a chat.json"
    _, _, err = run("chat", "--system", "be brief", given=f"a\n/save {file}\n/save\n")
    assert (
        err == f"saved 1 turns in {file}\nerror: /save: expected a file name after it, found none\n"
    )
    saved = json.loads(file.read_text())["messages"]
    assert [message["role"] for message in saved] == ["system", "user", "assistant"]
    _, _, err = run("chat", given=f"/load {file}\nb\n")
    assert err == f"loaded 1 turns from {file}\n"
    assert fake.made.asked == [[*saved, {"role": "user", "content": "b"}]]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("", "found a mistake at line 1, column 1"),
        ('{"messages": [\n}', "found a mistake at line 2, column 1"),
        ("[" * 100_000, "found too many nested brackets"),
        ("\udcff", "found a byte at position 0 that is not UTF-8"),
        ("{}", "expected an object with a list of messages, found {}"),
        ("[]", "expected an object with a list of messages, found []"),
        ('{"messages": "a"}', "expected an object with a list of messages"),
        ('{"messages": [1]}', "expected a role and a text in message 1, found 1"),
        (
            '{"messages": [{"role": "robot", "content": "a"}]}',
            "expected a role and a text in message 1",
        ),
        (
            '{"messages": [{"role": "user", "content": 7}]}',
            "expected a role and a text in message 1",
        ),
        (
            '{"messages": [{"role": "user", "content": "a"}]}',
            'expected pairs of user and assistant, .*found \\["user"',
        ),
        (None, "found: No such file or directory; check the path"),
        ("folder", "found: Is a directory; check the path"),
    ],
)
def test_other_files_are_not_loaded(
    text: str | None, found: str, run: Run, fake: type[FakeLLM], tmp_path: Path
) -> None:
    file = tmp_path / "file"
    if text == "folder":
        file.mkdir()
    elif text is not None:
        file.write_bytes(text.encode(errors="surrogateescape"))
    code, _, err = run("chat", given=f"a\n/load {file}\nb\n")
    assert (code, err.count("\n")) == (0, 1)
    assert err.startswith("error: ")
    assert str(file) in err
    assert re.search(found if "\\[" in found else re.escape(found), err) is not None, err
    assert len(fake.made.asked[1]) == 3  # the conversation goes on


def test_ctrl_c_at_the_prompt_keeps_the_chat(
    run: Run, fake: type[FakeLLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[Any] = ["a", KeyboardInterrupt, "b", EOFError]

    def read(_: str) -> str:
        line = lines.pop(0)
        if isinstance(line, str):
            return line
        raise line

    monkeypatch.setattr("builtins.input", read)
    monkeypatch.setattr(ChatSession, "_interactive", property(lambda _: True))
    code, _, err = run("chat")
    assert code == 0
    assert "\nCtrl-D ends the chat; /save FILE keeps it\n" in err
    assert [len(messages) for messages in fake.made.asked] == [1, 3]


def test_ctrl_c_ends_a_chat_without_a_terminal(
    run: Run, fake: type[FakeLLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(_: str) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr("builtins.input", interrupt)
    assert run("chat") == (0, "", "")


def test_quoted_messages_are_no_commands(run: Run, fake: type[FakeLLM]) -> None:
    assert run("chat", given='"""/exit"""\n"""\n/etc/hosts\n"""\n')[0] == 0
    assert [messages[-1]["content"] for messages in fake.made.asked] == ["/exit", "/etc/hosts"]


def test_saving_does_not_replace_other_files(run: Run, fake: type[FakeLLM], tmp_path: Path) -> None:
    file = tmp_path / "notes"
    chat = tmp_path / "chat"
    file.write_text("mine")
    _, _, err = run(
        "chat", given=f"a\n/save {file}\n/save ~nobody-at-all/x\n/save {chat}\n/save {chat}\n"
    )
    assert file.read_text() == "mine"
    assert err.count("saved 1 turns") == 2
    assert err.count("error: ") == 2


def test_model_without_chat_template(
    run: Run, fake: type[FakeLLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: FakeLLM, messages: object, **_: object) -> list[int]:
        raise TokenizerError("the model has no chat template")

    monkeypatch.setattr(fake, "chat_ids", refuse)
    assert_mistake(run("chat", given="a\n"), "no chat template")


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (["--foo"], "--foo"),
        (["generat"], "did you mean generate?"),
        (["generate", "--temperature", "warm", "x"], "'warm'"),
        (["generate", "x", "y"], "y"),
        (["generate", "--threads", "0", "x"], "0"),
    ],
)
def test_usage_errors_are_one_line_with_a_hint(run: Run, args: list[str], expected: str) -> None:
    assert_mistake(run(*args), expected, "--help')")


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (["--max-tokens", "0"], ["--max-tokens", "0"]),
        (["--temperature", "nan"], ["temperature", "nan"]),
        (["--logit-bias", "7"], ["logit_bias", "ID=VALUE", "'7'"]),
        (["--logit-bias", "7=101"], ["logit_bias", "101"]),
        (["--stop", ""], ["stop", "empty"]),
        (["--rule", "luck"], ["rule", "one of coupled, rejection, block", "luck"]),
        (["--logprobs", "65"], ["logprobs", "64", "65"]),
    ],
)
def test_option_out_of_range_is_refused_before_loading(
    run: Run, args: list[str], expected: list[str]
) -> None:
    """One value per option; the tests of :class:`SamplingParams` cover the ranges."""
    assert_mistake(run("generate", "x", "--model", "no such folder", *args), *expected)


def test_prompt_given_wrongly(run: Run, fake: type[FakeLLM], tmp_path: Path) -> None:
    assert_mistake(run("generate"), "PROMPT", "neither")
    assert_mistake(run("generate", "x", "--prompt-file", "y"), "PROMPT", "both")
    missing = str(tmp_path / "none")
    folder = str(tmp_path)
    expected = "prompt-file: expected a file that can be read at"
    assert_mistake(
        run("generate", "--prompt-file", missing),
        f"{expected} {missing}, found No such file or directory;",
    )
    assert_mistake(
        run("generate", "--prompt-file", folder), f"{expected} {folder}, found Is a directory;"
    )
    assert_mistake(run("generate", "-", given=b"\xff"), "UTF-8")


def test_unexpected_error_is_one_line_unless_the_traceback_is_asked_for(
    run: Run, fake: type[FakeLLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: FakeLLM, prompt: str, params: SamplingParams, **_: object) -> Iterator[Piece]:
        raise RuntimeError("out of\nmemory")

    monkeypatch.setattr(fake, "stream", fail)
    code, _, err = run("generate", "x")
    message = (
        "generate: expected no error, found RuntimeError: out of memory; "
        "pronk --traceback ... shows where"
    )
    assert (code, err) == (1, f"pronk: error: {message}\n")
    with pytest.raises(RuntimeError, match="memory"):
        main(["--traceback", "generate", "x"])


@pytest.fixture
def broken(checkpoint: MakeCheckpoint, tmp_path: Path) -> Path:
    """Return a copy of a checkpoint, which a test may damage."""
    for path in checkpoint("llama").iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    return tmp_path


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        ([""], ["prompt", "expected at least one token"]),
        (["x" * 400], ["prompt", "context", "256"]),
        (["x", "--regex", "[a"], ["guide", "regex"]),
        (["x", "--logit-bias", "300=1"], ["logit_bias", "299", "300"]),
        (["x", "--stop-token-ids", "300"], ["stop_token_ids", "299", "300"]),
        (["x", "--drafter", "magic"], ["magic", "prompt_lookup", "autoregressive"]),
        (["x", "--dtype", "int3"], ["dtype", "int3", "bfloat16"]),
        (["x", "--device", "abacus"], ["device", "abacus"]),
        (["x", "--kv-memory", "lots"], ["kv_memory", "lots"]),
    ],
)
def test_requests_that_do_not_fit(
    run: Run,
    checkpoint: MakeCheckpoint,
    monkeypatch: pytest.MonkeyPatch,
    args: list[str],
    expected: list[str],
) -> None:
    """Reported before the weights are loaded, which takes seconds for a large model."""
    monkeypatch.setattr(pronk.llm, "load_decoder", None)
    assert_mistake(run("generate", "--model", str(checkpoint("llama")), *args), *expected)


def test_too_little_kv_memory(run: Run, checkpoint: MakeCheckpoint) -> None:
    args = ["generate", "--model", str(checkpoint("llama")), "x", "--kv-memory", "1KiB"]
    assert_mistake(run(*args), "kv_memory", "1KiB")


Breaks = Callable[[Path], object]


def edit_config(**changes: Any) -> Breaks:
    def change(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return change


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda folder: (folder / "config.json").unlink(), ["config.json"]),
        (
            edit_config(model_type="retnet"),
            ["unknown architecture", "retnet", "bamba", "deepseek_v2"],
        ),
        (lambda folder: (folder / "model.safetensors").write_bytes(b""), ["model.safetensors"]),
        (lambda folder: (folder / "tokenizer.json").unlink(), ["tokenizer.json"]),
        (edit_config(vocab_size=299), ["298", "299"]),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_broken_checkpoints(run: Run, broken: Path, change: Breaks, expected: list[str]) -> None:
    change(broken)
    assert_mistake(run("generate", "x", "--model", str(broken)), *expected)


def test_no_such_model(run: Run, tmp_path: Path) -> None:
    assert_mistake(run("generate", "x", "--model", str(tmp_path / "none")), "none")
    assert_mistake(run("generate", "x", "--model", str(tmp_path)), "config.json")


def test_real_model_in_a_process(checkpoint: MakeCheckpoint) -> None:
    def generate(*more: str) -> subprocess.CompletedProcess[str]:
        command = [
            sys.executable,
            "-W",
            "error",
            "-c",
            "from pronk.cli.main import main; main()",
            "generate",
            "--model",
        ]
        command += [str(checkpoint("llama")), "def add(a, b):", "--max-tokens", "8", *more]
        return subprocess.run(command, capture_output=True, text=True, timeout=HUNG, check=False)

    plain = generate()
    as_json = generate("--json")
    wrong = generate("--temperature", "-1")
    assert (plain.returncode, plain.stderr, as_json.returncode, as_json.stderr) == (0, "", 0, "")
    assert json.loads(as_json.stdout)["text"].rstrip("\n") == plain.stdout.rstrip("\n")
    assert_mistake((wrong.returncode, wrong.stdout, wrong.stderr), "temperature")


@pytest.mark.parametrize("name", ["generate", "chat"])
def test_help_does_not_wait_for_torch(name: str) -> None:
    program = f"""
import sys, pronk.cli.main
try:
    pronk.cli.main.main(["{name}", "--help"])
finally:
    heavy = {{"torch", "numpy", "tokenizers", "pydivsufsort", "rich.progress"}}
    assert not heavy & set(sys.modules), "imported too early"
"""
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=HUNG, check=False
    )
    assert (result.returncode, result.stderr) == (0, "")


@pytest.mark.parametrize("chosen", [(), ("sql=a",)])
def test_texts_are_computed_with_the_adapter(
    run: Run, fake: type[FakeLLM], chosen: tuple[str, ...]
) -> None:
    options = [word for pair in chosen for word in ("--adapter", pair)]
    for command, given in (
        (["generate", "x"], ""),
        (["generate", "x", "--json"], ""),
        (["chat"], "hello\n"),
    ):
        assert run(*command, *options, given=given)[0] == 0
        assert fake.made.adapter == ("sql" if chosen else None)


@pytest.mark.parametrize(
    ("pairs", "message"),
    [
        (("sql",), "expected NAME=FOLDER with a new name, for example sql=./sql-lora, found 'sql'"),
        (("sql=",), "found 'sql='"),
        (("a=b", "a=c"), "found 'a=c'"),
        (("a=b", "c=d"), "adapter: expected one, found a, c; leave the others out"),
    ],
)
def test_mistakes_in_adapters(
    run: Run, fake: type[FakeLLM], pairs: tuple[str, ...], message: str
) -> None:
    del fake
    options = [word for pair in pairs for word in ("--adapter", pair)]
    assert_mistake(run("generate", "x", *options), message)
    assert_mistake(run("chat", *options), message)
