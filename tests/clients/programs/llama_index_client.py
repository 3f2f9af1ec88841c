"""Use LlamaIndex's model for servers like OpenAI's; print what it returned."""

import json
import sys

from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike

url, key = sys.argv[1:]
server = {
    "model": "tiny",
    "api_base": f"{url}/v1",
    "api_key": key,
    "context_window": 2048,
    "temperature": 0.0,
    "max_retries": 0,
}
chat = OpenAILike(**server, max_tokens=12, is_chat_model=True)
calling = OpenAILike(
    **server, max_tokens=60, is_chat_model=True, is_function_calling_model=True, strict=True
)
completing = OpenAILike(**server, max_tokens=12, is_chat_model=False)
messages = [ChatMessage(role="user", content="Say hello, please.")]


def weather(city: str) -> str:
    """Return the weather of a city."""
    return f"4 degrees in {city}"


tool = FunctionTool.from_defaults(weather)
streamed = [chunk.delta or "" for chunk in chat.stream_chat(messages)]
called = calling.chat_with_tools([tool], chat_history=messages, tool_required=True)
(call,) = calling.get_tool_calls_from_response(called)
facts = {
    "chat": chat.chat(messages).message.content,
    "streamed": "".join(streamed),
    "chunks": len(streamed),
    "call": [call.tool_name, call.tool_kwargs],
    "completion": completing.complete("def f(x):").text,
}
json.dump(facts, sys.stdout)
