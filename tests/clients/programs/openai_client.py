"""Use OpenAI's client on every route; print what it returned."""

import json
import sys

import openai
from pydantic import BaseModel

url, key = sys.argv[1:]
api = openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0)
messages = [{"role": "user", "content": "Say hello, please."}]
schema = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Oslo"]}},
    "required": ["city"],
}
schema["additionalProperties"] = False
function = {"name": "weather", "description": "Weather of a city.", "parameters": schema}
tools = [{"type": "function", "function": function}]
greedy = {"model": "tiny", "temperature": 0}


class City(BaseModel):
    """A city."""

    name: str
    inhabitants: int


facts = {"version": openai.__version__, "models": [each.id for each in api.models.list()]}
completion = api.completions.create(prompt="def f(x):", max_tokens=12, **greedy)
facts["completion"] = completion.choices[0].text

chat = api.chat.completions.create(messages=messages, max_tokens=12, **greedy)
facts["chat"] = chat.choices[0].message.content
facts["usage"] = chat.usage.model_dump()
stream = api.chat.completions.create(
    messages=messages, max_tokens=12, stream=True, stream_options={"include_usage": True}, **greedy
)
chunks = [*stream]
deltas = [each.choices[0].delta for each in chunks if each.choices]
facts["chat stream"] = "".join(delta.content or "" for delta in deltas)
facts["chunks"] = len(chunks)
facts["stream usage"] = chunks[-1].usage.model_dump()

once = {"tool_choice": "required", "parallel_tool_calls": False}
asked = {"messages": messages, "tools": tools, "max_tokens": 60}
called = api.chat.completions.create(**asked, **once, **greedy)
call = called.choices[0].message.tool_calls[0]
facts["call"] = [call.function.name, call.function.arguments]
result = {"role": "tool", "tool_call_id": call.id, "content": "4 degrees"}
talk = [*messages, called.choices[0].message, result]
after = api.chat.completions.create(messages=talk, tools=tools, max_tokens=5, **greedy)
facts["after call"] = after.usage.total_tokens

limit = {"max_tokens": 200, "temperature": 0.8, "seed": 3}
parsed = api.chat.completions.parse(model="tiny", messages=messages, response_format=City, **limit)
facts["parsed"] = parsed.choices[0].message.parsed and parsed.choices[0].message.parsed.model_dump()
facts["parsed reason"] = parsed.choices[0].finish_reason

response = api.responses.create(input="Say hello, please.", max_output_tokens=12, **greedy)
facts["response"] = response.output_text
with api.responses.stream(input="Say hello, please.", max_output_tokens=12, **greedy) as events:
    received = [*events]
facts["response stream"] = [event.type for event in received]
texts = [each.delta for each in received if each.type == "response.output_text.delta"]
facts["response streamed"] = "".join(texts)
flat = [{"type": "function", **function}]
asked = api.responses.create(input="Hi", tools=flat, max_output_tokens=60, **once, **greedy)
items = [item.model_dump(exclude_none=True) for item in asked.output]
facts["response call"] = [items[-1]["name"], items[-1]["arguments"]]
output = {"type": "function_call_output", "call_id": items[-1]["call_id"], "output": "4 degrees"}
again = [{"role": "user", "content": "Hi"}, *items, output]
finished = api.responses.create(input=again, tools=flat, max_output_tokens=5, **greedy)
facts["response after call"] = finished.status

vectors = api.embeddings.create(model="tiny", input=["one", "two"]).data
facts["embeddings"] = [len(each.embedding) for each in vectors]
json.dump(facts, sys.stdout)
