"""Time to the first token of turn 20 of an agent's conversation, as a server answers it.

    python benchmarks/agent_turns.py MODEL.gguf
    python benchmarks/agent_turns.py MODEL.gguf --whole      # also with --keep-volatile

The requests have the shape of Claude Code's: a system prompt of several blocks, the first of which
differs in every request, tools, and results of tools. The server has answered turn 19, so that only
the result of the last tool is new. Each repetition has another result of the same length, and is
measured twice, interleaved: as a request to ``/v1/messages``, from its JSON text to the first
event with text, and as the forward pass of the new tokens alone, without drafter, template and
tokenizer. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any

from prompt_cache import make_tool

from pronk import LLM, AsyncLLM
from pronk.lab.bench.machine import describe_hardware
from pronk.server.protocol.messages import MessagesRequest
from pronk.server.service import Service
from pronk.server.settings import ServerSettings

_WORDS = """
    the path of result returns an error if it does not exist and limits output to lines that match
    given pattern relative to root of repository with encoding timeout in seconds before after
""".split()
_RULES = "You are Claude Code. You answer with calls of the tools, and read files before edits. "
_NEVER = 10**6  # number of a turn whose result no other request has


def make_body(turn: int, num_tools: int, variant: int) -> dict[str, Any]:
    """Return the request of a turn of a conversation.

    Args:
        turn: number of the user's messages.
        num_tools: number of tools.
        variant: seed of the last result and of the line that differs in every request.
    """
    dice = random.Random(variant)
    billing = f"cc_version=2.1.263.a1b; cc_entrypoint=cli; cch={dice.randrange(16**5):05x};"
    system = [f"x-anthropic-billing-header: {billing}", _RULES, _RULES * 20]
    tools = list[dict[str, Any]]()
    for number in range(num_tools):
        function = make_tool(number)["function"]
        schema = function["parameters"]
        tools.append({"name": function["name"], "description": "", "input_schema": schema})
    messages: list[dict[str, Any]] = [{"role": "user", "content": "Find out why the tests fail."}]
    for number in range(1, turn):
        is_last = number == turn - 1
        words = random.Random(variant if is_last else number).choices(_WORDS, k=150)
        ident = f"call_{number}"
        use = {"type": "tool_use", "id": ident, "name": tools[number % num_tools]["name"]}
        result = {"type": "tool_result", "tool_use_id": ident, "content": " ".join(words)}
        messages.append({"role": "assistant", "content": [{**use, "input": {"path": "a.py"}}]})
        messages.append({"role": "user", "content": [result]})
    return {
        "system": [{"type": "text", "text": text} for text in system],
        "tools": tools,
        "messages": messages,
        "max_tokens": 1,
        "temperature": 0,
        "stream": True,
    }


async def time_request(service: Service, body: dict[str, Any]) -> tuple[float, dict[str, Any]]:
    """Return the seconds from a request's JSON text to the first token, and the token counts."""
    text = json.dumps(body)
    start = perf_counter()
    request = MessagesRequest.model_validate_json(text)
    first: float | None = None
    usage: dict[str, Any] = {}
    async for events in service.stream(request):
        if first is None:
            first = perf_counter() - start
        for event in events:
            usage = event.get("usage", usage)
    assert first is not None
    return first, usage


async def time_new_tokens(service: Service, body: dict[str, Any]) -> float:
    """Return the seconds of the engine alone, from token ids to the first token."""
    prepared = await service.prepare(MessagesRequest.model_validate(body))
    start = perf_counter()
    # The schedule has the salt of the server's cached blocks.
    schedule = service._schedule("", start)  # noqa: SLF001
    params = replace(prepared.inputs.params, guide=None)
    steps = service.engine.steps(
        prepared.inputs.prompts, params, drafter="autoregressive", **schedule
    )
    seconds = 0.0
    async for _ in steps:
        seconds = seconds or perf_counter() - start
    return seconds


async def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Load the model, answer the turn before the last one, and measure the last turn."""
    llm = LLM(
        options.model,
        prefix_cache=True,
        max_batch=1,
        threads=options.threads,
        kv_memory=options.kv_memory,
    )
    service = Service(AsyncLLM(llm), ServerSettings(name="model"))
    last = options.turns - 1  # its last result has the number of the turn before, as in all turns
    earlier, _ = await time_request(service, make_body(last, options.tools, last - 1))
    requests = list[float]()
    floors = list[float]()
    usage: dict[str, Any] = {}
    for repetition in range(options.repeat):
        variant = _NEVER + 2 * repetition
        seconds, usage = await time_request(
            service, make_body(options.turns, options.tools, variant)
        )
        requests.append(seconds)
        body = make_body(options.turns, options.tools, variant + 1)
        floors.append(await time_new_tokens(service, body))
    ratios = [request / floor for request, floor in zip(requests, floors, strict=True)]
    found: dict[str, Any] = {
        "model": options.model.name,
        "hardware": describe_hardware(llm.device),
        "turn": options.turns,
        "cached tokens": usage["cache_read_input_tokens"],
        "new tokens": usage["input_tokens"],
        "seconds of the turn before, nothing cached": round(earlier, 3),
        "seconds to first token": round(statistics.median(requests), 4),
        "seconds of the new tokens alone": round(statistics.median(floors), 4),
        "ratio": round(statistics.median(ratios), 3),
    }
    if options.whole:
        kept = Service(service.engine, ServerSettings(name="model", keep_volatile=True))
        body = make_body(options.turns, options.tools, _NEVER - 1)
        seconds, usage = await time_request(kept, body)
        found["seconds with --keep-volatile"] = round(seconds, 3)
        found["cached tokens with --keep-volatile"] = usage["cache_read_input_tokens"]
    service.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--tools", type=int, default=70, help="70 give 15,000 tokens")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--kv-memory", default="1GiB")
    parser.add_argument("--whole", action="store_true", help="also measure with --keep-volatile")
    print(json.dumps(asyncio.run(measure(parser.parse_args()))))


if __name__ == "__main__":
    main()
