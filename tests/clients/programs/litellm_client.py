"""Use LiteLLM on the routes of OpenAI and of Anthropic; print what it returned."""

import asyncio
import json
import sys

import litellm

url, key = sys.argv[1:]
messages = [{"role": "user", "content": "Say hello, please."}]
schema = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Oslo"]}},
    "required": ["city"],
}
schema["additionalProperties"] = False
function = {"name": "weather", "description": "Weather of a city.", "parameters": schema}
tools = [{"type": "function", "function": function}]
once = {"tool_choice": "required", "parallel_tool_calls": False}
form = {"type": "json_schema", "json_schema": {"name": "city", "schema": schema, "strict": True}}
drivers = {
    "openai": {"model": "openai/tiny", "api_base": f"{url}/v1", "api_key": key},
    "hosted_vllm": {"model": "hosted_vllm/tiny", "api_base": f"{url}/v1", "api_key": key},
    "lm_studio": {"model": "lm_studio/tiny", "api_base": f"{url}/v1", "api_key": key},
    "llamafile": {"model": "llamafile/tiny", "api_base": f"{url}/v1", "api_key": key},
    "anthropic": {"model": "anthropic/tiny", "api_base": url, "api_key": key},
}
facts = {}
for name, driver in drivers.items():
    greedy = {**driver, "temperature": 0}
    found = {}
    answer = litellm.completion(messages=messages, max_tokens=16, **greedy)
    found["text"] = answer.choices[0].message.content
    found["prompt tokens"] = answer.usage.prompt_tokens
    chunks = [*litellm.completion(messages=messages, max_tokens=16, stream=True, **greedy)]
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    found["streamed"] = "".join(delta.content or "" for delta in deltas)
    found["chunks"] = len(chunks)
    called = litellm.completion(messages=messages, tools=tools, max_tokens=60, **once, **greedy)
    call = called.choices[0].message.tool_calls[0]
    found["call"] = [call.function.name, call.function.arguments]
    found["reason"] = called.choices[0].finish_reason
    result = {"role": "tool", "tool_call_id": call.id, "content": "4 degrees"}
    talk = [*messages, called.choices[0].message, result]
    after = litellm.completion(messages=talk, tools=tools, max_tokens=5, **greedy)
    found["after call"] = after.usage.completion_tokens
    formed = litellm.completion(messages=messages, response_format=form, max_tokens=60, **greedy)
    found["formed"] = formed.choices[0].message.content
    facts[name] = found

openai = drivers["openai"]
asked = {"input": "Say hello, please.", "max_output_tokens": 16, "temperature": 0}
response = litellm.responses(**asked, **openai)
facts["response"] = response.output[0].content[0].text
facts["embedding"] = len(litellm.embedding(input=["one"], **openai).data[0]["embedding"])


async def answers() -> list[str]:
    """Return the texts of three requests at once, in the format of Anthropic's Messages API."""
    asked = {"messages": messages, "max_tokens": 16, "temperature": 0}
    create = litellm.anthropic.messages.acreate
    found = await asyncio.gather(*(create(**asked, **drivers[name]) for name in chosen))
    return [each["content"][0]["text"] for each in found]


chosen = ("anthropic", "openai", "hosted_vllm")
facts["messages"] = asyncio.run(answers())
json.dump(facts, sys.stdout)
