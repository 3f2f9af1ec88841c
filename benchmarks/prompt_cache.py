"""Time to the first token of an agent's last turn after a restart, with and without prompt cache.

    python benchmarks/prompt_cache.py MODEL.gguf
    python benchmarks/prompt_cache.py MODEL.gguf --tokens 2000     # models with a short context

The system prompt has tools of 12,000 tokens, and the conversation has 20 turns, in the form of
Qwen's and Hermes' chat templates (``<tools>``, ``<tool_call>``, ``<tool_response>``). Each turn
after the first has the result of a tool call. One process answers all turns but the last, and ends.
New processes answer the last turn, with the prompt cache on disk and without; their tokens must be
equal. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from pronk import LLM, SamplingParams
from pronk.lab.bench.machine import describe_hardware
from pronk.text.tokenizer import Tokenizer

Conversation = list[dict[str, str]]

_VERBS = """
    read write list search run diff commit fetch move copy delete format lint test build deploy
    trace
""".split()
_NOUNS = """
    file folder branch symbol process package image table record issue ticket page mail event
    metric
""".split()
_WORDS = """
    the path of result returns an error if it does not exist and limits output to lines that
    match given pattern relative to root of repository with optional encoding timeout in seconds
    before after each call must be absolute
""".split()


def make_tool(number: int) -> dict[str, Any]:
    """Return a tool definition in OpenAI's format."""
    dice = random.Random(number)
    verb = _VERBS[number % len(_VERBS)]
    noun = _NOUNS[number // len(_VERBS) % len(_NOUNS)]
    fields = dict[str, dict[str, str]]()
    for index in range(4):
        name = f"{dice.choice(_NOUNS)}_{index}"
        kind = dice.choice(("string", "integer", "boolean"))
        fields[name] = {"type": kind, "description": " ".join(dice.choices(_WORDS, k=12))}
    function = {
        "name": f"{verb}_{noun}_{number}",
        "description": " ".join(dice.choices(_WORDS, k=25)),
        "parameters": {"type": "object", "properties": fields, "required": [*fields][:2]},
    }
    return {"type": "function", "function": function}


def make_conversation(tokenizer: Tokenizer, tokens: int, turns: int) -> Conversation:
    """Return a conversation with ``turns`` user messages.

    The system prompt has ``tokens`` tokens, or up to the length of a tool more.
    """
    system = "You are an agent. You answer with calls of the tools.\n<tools>\n"
    number = 0
    while len(tokenizer.encode(system)) < tokens:
        system += json.dumps(make_tool(number)) + "\n"
        number += 1
    messages = [
        {"role": "system", "content": f"{system}</tools>"},
        {"role": "user", "content": "Find out why the tests fail, and repair the code."},
    ]
    for turn in range(1, turns):
        dice = random.Random(turn)
        tool = make_tool(dice.randrange(number))["function"]
        given = {name: dice.choice(_WORDS) for name in tool["parameters"]["required"]}
        call = json.dumps({"name": tool["name"], "arguments": given})
        place = f"src/{dice.choice(_NOUNS)}.py:{dice.randrange(999)}"
        lines = [f"{place}: {' '.join(dice.choices(_WORDS, k=9))}"] * 2
        for _ in range(4):
            place = f"src/{dice.choice(_NOUNS)}.py:{dice.randrange(999)}"
            lines.append(f"{place}: def {dice.choice(_VERBS)}():")
        messages.append({"role": "assistant", "content": f"<tool_call>\n{call}\n</tool_call>"})
        result = "\n".join(lines)
        messages.append({"role": "user", "content": f"<tool_response>\n{result}\n</tool_response>"})
    return messages


def run_child(options: argparse.Namespace) -> None:
    """Load the model, answer the turns ``--first`` to ``--last``, and print the last one's times.

    This is the work of a process that :func:`call_child` starts.
    """
    llm = LLM(
        options.model,
        prompt_cache=options.folder or None,
        prefix_cache=True,
        max_batch=1,
        threads=options.threads,
        kv_memory=options.kv_memory,
    )
    messages = make_conversation(llm.tokenizer, options.tokens, options.turns)
    users = [index for index, message in enumerate(messages) if message["role"] == "user"]
    found: list[dict[str, Any]] = []
    for index in users[options.first - 1 : options.last]:
        params = SamplingParams(max_tokens=options.max_tokens)
        done = llm.generate(llm.chat_ids(messages[: index + 1]), params)
        stats = done.stats
        figures = {
            "prompt": stats.prompt_tokens,
            "cached": stats.cached_tokens,
            "from disk": stats.disk_tokens,
        }
        found.append({"ttft": stats.ttft, **figures, "tokens": done.token_ids})
    llm.close()
    print(json.dumps(found[-1]))


def call_child(options: argparse.Namespace, folder: str, first: int, last: int) -> dict[str, Any]:
    """Answer the turns ``first`` to ``last`` in a new process; return the figures of the last."""
    command = [sys.executable, __file__, str(options.model), "--child", "--folder", folder]
    for name in ("tokens", "turns", "max_tokens", "threads", "kv_memory"):
        command += [f"--{name.replace('_', '-')}", str(getattr(options, name))]
    command += ["--first", str(first), "--last", str(last)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)  # noqa: S603
    figures: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument(
        "--tokens", type=int, default=12_000, help="tokens of the system prompt with its tools"
    )
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--max-tokens", type=int, default=32, help="tokens of an answer")
    parser.add_argument("--rounds", type=int, default=3, help="restarts with the cache")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--kv-memory", default="2GiB")
    for name, kind in (("--folder", str), ("--first", int), ("--last", int)):
        parser.add_argument(name, type=kind, help=argparse.SUPPRESS)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        run_child(options)
        return
    with tempfile.TemporaryDirectory() as folder:
        call_child(options, folder, 1, options.turns - 1)
        stored = sum(file.stat().st_size for file in Path(folder).iterdir())
        restarts = []
        for _ in range(options.rounds):
            # Each restart has a copy of the cache, without the last turn of other restarts.
            with tempfile.TemporaryDirectory() as copy:
                for file in Path(folder).iterdir():
                    (Path(copy) / file.name).write_bytes(file.read_bytes())
                restarts.append(call_child(options, copy, options.turns, options.turns))
    plain = call_child(options, "", options.turns, options.turns)
    assert all(restart["tokens"] == plain["tokens"] for restart in restarts), "the tokens differ"
    seconds = statistics.median(restart["ttft"] for restart in restarts)
    machine = describe_hardware("cpu")["processor"]
    ratio = seconds / plain["ttft"]
    turn = f"turn {options.turns}, {plain['prompt']} tokens"
    print(f"{options.model.name}, {options.threads} threads, {machine}; {turn}")
    print(f"without the prompt cache   first token after {plain['ttft']:8.2f} s")
    print(f"after a restart with it    first token after {seconds:8.2f} s, {ratio:.4f} of that")
    read = f"{restarts[0]['from disk']} tokens read from disk"
    print(f"{read}, {stored / 1e6:.0f} MB stored, tokens equal")
    report = {
        "model": options.model.name,
        "processor": machine,
        "threads": options.threads,
        "stored": stored,
        "plain": plain,
        "restarts": restarts,
        "ratio": ratio,
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
