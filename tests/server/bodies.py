"""Random request bodies of the three APIs for conversations, made by a grammar; the same seed makes
the same body.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

CHAT = "/v1/chat/completions"
RESPONSES = "/v1/responses"
MESSAGES = "/v1/messages"
COMPLETIONS = "/v1/completions"
ROUTES = (CHAT, RESPONSES, MESSAGES)
LIMIT = {CHAT: "max_tokens", RESPONSES: "max_output_tokens", MESSAGES: "max_tokens"}
WORDS = (
    "Hi",
    "",
    " ",
    "What is 2+2?",
    "<|end|>",
    "naïve 😀",
    "a\nb",
    "```json\n{}\n```",
    "x" * 300,
    "<tool_call>",
    "\0",
)
NAMES = ("f", "get_weather", "mcp__git__log", "a.b", "x" * 128, "no good name", "é", "")
JSON_VALUES: tuple[Any, ...] = (
    None,
    True,
    False,
    0,
    1,
    -1,
    0.5,
    "",
    "x",
    [],
    {},
    ["x"],
    {"x": 1},
    10**12,
)
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max", "auto", "ultra", "")
CACHE = {"type": "ephemeral", "ttl": "1h", "scope": "global"}
# Fields that clients send, with values that may be right, neutral, wrong or of another API.
EXTRA: dict[str, Sequence[Any]] = {
    "temperature": (0, 0.7, 1, 2, -1, "hot"),
    "top_p": (0, 0.9, 1, 2),
    "top_k": (-1, 0, 40, -5),
    "min_p": (0, 0.1, 7),
    "n": (1, 2, 0),
    "seed": (-1, 0, 2**40),
    "stop": ("x", ["a", "b"], [], "", "<|end|>"),
    "stop_sequences": (["x"], []),
    "presence_penalty": (0, 1, 9),
    "repetition_penalty": (1, 1.1, 0),
    "repeat_penalty": (1.0, 1.3),
    "logit_bias": ({}, {"5": 2}, {"x": 1}),
    "logprobs": (True, False, 2, None),
    "top_logprobs": (0, 2, 99),
    "stream_options": ({"include_usage": True}, {"include_obfuscation": False}, {}),
    "reasoning_effort": EFFORTS,
    "reasoning": (
        {"effort": "max"},
        {"summary": "auto"},
        {"enabled": False},
        {"max_tokens": 9},
        {},
    ),
    "thinking": (
        {"type": "adaptive"},
        {"type": "enabled", "budget_tokens": 9},
        {"type": "disabled"},
        True,
    ),
    "think": (True, False, "high"),
    "enable_thinking": (True, False),
    "thinking_budget": (-1, 0, 5),
    "thinking_message": ("", "Enough."),
    "verbosity": ("low", "high"),
    "store": (True, False),
    "metadata": ({}, {"a": "b"}, {"a": {"b": [1]}}),
    "user": ("me", "x" * 600),
    "service_tier": ("auto", "flex"),
    "prompt_cache_key": ("k",),
    "prompt_cache_retention": ("24h",),
    "cache_prompt": (True, False),
    "keep_alive": ("5m", -1),
    "id_slot": (-1, 0),
    "prediction": ({"type": "content", "content": "x"},),
    "mirostat": (0, 2),
    "options": ({}, {"num_ctx": 9}, {"temperature": 0}, {"mirostat": 1}),
    "context_management": (
        {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        {},
        None,
    ),
    "include": (["reasoning.encrypted_content"], ["unheard.of"], []),
    "truncation": ("auto", "disabled"),
    "text": (
        {"verbosity": "low"},
        {"format": {"type": "text"}},
        {"format": {"type": "json_object"}},
    ),
    "response_format": ({"type": "text"}, {"type": "json_object"}, {"type": "xml"}),
    "output_config": ({"effort": "max"}, {"task_budget": {"type": "tokens", "total": 9}}, {}),
    "parallel_tool_calls": (True, False),
    "functions": ([], [{"name": "f"}]),
    "previous_response_id": (None, "x"),
    "mcp_servers": ([], [{"type": "url"}]),
    "drafter": ("suffix", "autoregressive", "nonsense"),
    "continue_final_message": (True, False),
    "unheard_of": JSON_VALUES,
    "x_trace": JSON_VALUES,
}
SCHEMAS: Sequence[Any] = (
    None,
    {},
    {"type": "object"},
    {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]},
    {
        "type": "object",
        "properties": {"a": {"type": ["integer", "null"]}},
        "additionalProperties": False,
    },
    {
        "type": "object",
        "properties": {"a": {"enum": ["x", 1]}},
        "$schema": "http://x/y",
        "title": "t",
    },
)
ARGUMENTS = (
    "{}",
    '{"a": 1}',
    '{"a": "b',
    "",
    '{"a',
    {"a": 1},
    None,
    "null",
    "[]",
    "[1]",
    '{"a": NaN}',
    "no JSON",
)
RESULTS = (None, [], ["x"], [{"type": "text", "text": "x"}], {"a": 1}, 5)
OTHER_TYPES = (
    "web_search",
    "custom",
    "mcp",
    "image_generation",
    "bash_20250124",
    "namespace",
    "unheard_of",
)


@dataclass
class Bodies:
    """Generator of bodies; every method draws one production of the grammar."""

    draw: random.Random

    def body(self, route: str) -> dict[str, Any]:
        """Return a body for a route."""
        if route == COMPLETIONS:
            return self._completion()
        field = "input" if route == RESPONSES else "messages"
        body: dict[str, Any] = {
            field: self.conversation(route),
            LIMIT[route]: self.draw.randint(1, 3),
        }
        if route == RESPONSES and self.maybe(0.2):
            body["input"] = self.word()
        if self.maybe(0.4):
            body["tools"] = [self.tool(route) for _ in range(self.draw.randint(0, 3))]
        if self.maybe(0.3):
            body["tool_choice"] = self.choice(route)
        if self.maybe(0.3):
            body[
                "system" if route == MESSAGES else "instructions" if route == RESPONSES else "user"
            ] = self.word()
        if self.maybe(0.3):
            body["stream"] = True
        for name in self.draw.sample([*EXTRA], self.draw.randint(0, 3)):
            body[name] = self.draw.choice(EXTRA[name])
        return body

    def _completion(self) -> dict[str, Any]:
        """Return a body of ``/v1/completions``, most options of which all routes have."""
        prompt = self.draw.choice((self.word(), [self.word(), "x"], [1, 2, 3], [[1], [2]], "", []))
        body: dict[str, Any] = {"prompt": prompt, "max_tokens": self.draw.randint(1, 3)}
        if self.maybe(0.3):
            body["stream"] = True
        for name in self.draw.sample([*EXTRA], self.draw.randint(0, 3)):
            body[name] = self.draw.choice(EXTRA[name])
        return body

    def conversation(self, route: str) -> list[dict[str, Any]]:
        """Return messages or items; results follow their calls, mostly."""
        turns: list[dict[str, Any]] = [
            self.noted({"role": "user", "content": self.content(route, "user")})
        ]
        for _ in range(self.draw.randint(0, 3)):
            kind = self.draw.choice(("user", "assistant", "system", "call", "other"))
            turns += self.turn(route, kind)
        return turns

    def turn(self, route: str, kind: str) -> list[dict[str, Any]]:
        """Return the messages or items of one turn."""
        if kind == "call":
            return self.call_and_result(route)
        if kind == "other":
            return [self.other_item(route)]
        return [self.noted({"role": kind, "content": self.content(route, kind)})]

    def content(self, route: str, role: str) -> Any:
        """Return a text, or a list of parts."""
        if self.maybe(0.6):
            return self.word()
        if self.maybe(0.1):
            return self.draw.choice(
                ([self.word()], {"type": "text", "text": self.word()}, None, [], "")
            )
        kind = {
            CHAT: "text",
            RESPONSES: "output_text" if role == "assistant" else "input_text",
            MESSAGES: "text",
        }[route]
        parts = [
            self.noted({"type": kind, "text": self.word()}) for _ in range(self.draw.randint(0, 2))
        ]
        if self.maybe(0.1):
            parts.append(
                {
                    "type": self.draw.choice(
                        ("image_url", "input_image", "image", "thinking", "refusal")
                    )
                }
            )
        return parts

    def call_and_result(self, route: str) -> list[dict[str, Any]]:
        """Return a call of the assistant and its result."""
        ident = f"call_{self.draw.randrange(10**6)}"
        name = self.draw.choice(NAMES)
        arguments = self.draw.choice(ARGUMENTS)
        result = self.word() if self.maybe(0.8) else self.draw.choice(RESULTS)
        orphan = ident if self.maybe(0.9) else "another"
        if route == CHAT:
            call = self.noted(
                {
                    "id": ident,
                    "type": "function",
                    "function": {"name": name, "arguments": arguments},
                }
            )
            content = self.draw.choice((None, "", "x"))
            return [
                {"role": "assistant", "content": content, "tool_calls": [call]},
                {"role": "tool", "tool_call_id": orphan, "content": result},
            ]
        if route == RESPONSES:
            return [
                self.noted(
                    {
                        "type": "function_call",
                        "call_id": ident,
                        "name": name,
                        "arguments": arguments,
                    }
                ),
                {
                    "type": "function_call_output",
                    "call_id": orphan,
                    "output": result or [{"type": "input_image"}],
                },
            ]
        use = self.noted(
            {
                "type": "tool_use",
                "id": ident,
                "name": name,
                "input": self.draw.choice(({"a": 1}, None)),
            }
        )
        seen = [{"type": "text", "text": "x"}, {"type": "image"}] if self.maybe(0.3) else result
        block = self.noted({"type": "tool_result", "tool_use_id": orphan, "content": seen})
        return [{"role": "assistant", "content": [use]}, {"role": "user", "content": [block]}]

    def other_item(self, route: str) -> dict[str, Any]:
        """Return an item of another server's tool, or a message with such blocks."""
        if route == RESPONSES:
            kinds = (
                "web_search_call",
                "custom_tool_call",
                "reasoning",
                "compaction",
                "agent_message",
                "unheard_of",
            )
            kind = self.draw.choice(kinds)
            return {
                "type": kind,
                "id": "x",
                "summary": [],
                "content": self.draw.choice((None, "x", [])),
            }
        if route == MESSAGES:
            kinds = ("server_tool_use", "web_search_tool_result", "redacted_thinking", "unheard_of")
            return {"role": "assistant", "content": [{"type": self.draw.choice(kinds), "id": "x"}]}
        return {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "x", "type": "custom", "custom": {}}],
        }

    def tool(self, route: str) -> dict[str, Any]:
        """Return a tool: a function, or one of another server."""
        if self.maybe(0.3):
            return {"type": self.draw.choice(OTHER_TYPES), "name": "w", "tools": []}
        function = {"name": self.draw.choice(NAMES), "description": self.word()}
        schema = self.draw.choice(SCHEMAS)
        if route == MESSAGES:
            return self.noted({**function, "input_schema": schema or {}})
        function |= {"parameters": schema, "strict": self.draw.choice((None, True, False))}
        return self.noted(
            {"type": "function", **({"function": function} if route == CHAT else function)}
        )

    def choice(self, route: str) -> Any:
        """Return a choice of tools, mostly in the form of the route."""
        name = self.draw.choice(NAMES)
        modes: Sequence[Any] = (
            "auto",
            "none",
            "required",
            "any",
            "",
            {"type": "function", "name": name},
        )
        objects = (
            {"type": "auto"},
            {"type": "any"},
            {"type": "none"},
            {"type": "tool", "name": name},
            {"type": "x"},
        )
        return self.draw.choice(
            objects if route == MESSAGES and self.maybe(0.9) else (*modes, *objects)
        )

    def noted(self, value: dict[str, Any]) -> dict[str, Any]:
        """Return an object, perhaps with fields that only describe it."""
        if self.maybe(0.2):
            notes = {
                "cache_control": CACHE,
                "phase": "x",
                "id": "i",
                "status": "completed",
                "_meta": {},
            }
            name = self.draw.choice([name for name in notes if name not in value])
            return {**value, name: notes[name]}
        return value

    def word(self) -> str:
        """Return a text."""
        return self.draw.choice(WORDS)

    def maybe(self, share: float) -> bool:
        """Return True in this share of all draws."""
        return self.draw.random() < share


def shrink(body: dict[str, Any], fails: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """Return a body with as few fields as still fail, to read a failure by."""
    for name in [*body]:
        smaller = {key: value for key, value in body.items() if key != name}
        if fails(smaller):
            body = smaller
    return body
