"""Use Anthropic's client; print what it returned."""

import json
import sys

import anthropic

url, key = sys.argv[1:]
api = anthropic.Anthropic(base_url=url, api_key=key, max_retries=0)
messages = [{"role": "user", "content": "Say hello, please."}]
schema = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Oslo"]}},
    "required": ["city"],
}
schema["additionalProperties"] = False
tools = [{"name": "weather", "description": "Weather of a city.", "input_schema": schema}]
# The server takes the seed and the temperature of OpenAI's API, too.
greedy = {"model": "tiny", "extra_body": {"temperature": 0, "seed": 1}}

facts = {"version": anthropic.__version__}
message = api.messages.create(messages=messages, max_tokens=12, **greedy)
facts["text"] = message.content[0].text
facts["usage"] = message.usage.model_dump()
with api.messages.stream(messages=messages, max_tokens=12, **greedy) as stream:
    facts["events"] = [event.type for event in stream]
    facts["streamed"] = stream.get_final_text()
facts["counted"] = api.messages.count_tokens(model="tiny", messages=messages).input_tokens

once = {"tools": tools, "tool_choice": {"type": "any", "disable_parallel_tool_use": True}}
called = api.messages.create(messages=messages, max_tokens=60, **once, **greedy)
call = called.content[-1]
facts["call"] = [call.name, call.input]
facts["stop"] = called.stop_reason
result = {"type": "tool_result", "tool_use_id": call.id, "content": "4 degrees"}
talk = [
    *messages,
    {"role": "assistant", "content": called.content},
    {"role": "user", "content": [result]},
]
after = api.messages.create(messages=talk, tools=tools, max_tokens=5, **greedy)
facts["after call"] = after.usage.input_tokens + (after.usage.cache_read_input_tokens or 0)
counted = api.messages.count_tokens(model="tiny", messages=talk, tools=tools)
facts["counted after call"] = counted.input_tokens
json.dump(facts, sys.stdout)
