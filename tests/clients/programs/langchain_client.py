"""Use LangChain's chat model on both of OpenAI's routes; print what it returned."""

import json
import sys
from typing import Literal

from langchain_core.messages import ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings
from pydantic import BaseModel

url, key = sys.argv[1:]
server = {
    "base_url": f"{url}/v1",
    "api_key": key,
    "model": "tiny",
    "temperature": 0,
    "max_retries": 0,
}
question = "Say hello, please."


class City(BaseModel):
    """A city."""

    city: Literal["Paris", "Oslo"]


@tool
def weather(city: Literal["Paris", "Oslo"]) -> str:
    """Return the weather of a city."""
    return f"4 degrees in {city}"


facts = {}
# Without "strict", LangChain's schemas allow further fields; the small model adds them for ever.
once = {"tool_choice": "required", "parallel_tool_calls": False, "strict": True}
for name, more in (("chat", {}), ("responses", {"use_responses_api": True})):
    model = ChatOpenAI(max_tokens=12, **server, **more)
    answer = model.invoke(question)
    chunks = [*model.stream(question)]
    long = ChatOpenAI(max_tokens=60, **server, **more)
    called = long.bind_tools([weather], **once).invoke(question)
    (call,) = called.tool_calls
    result = weather.invoke(call)
    assert isinstance(result, ToolMessage)
    talk = [("user", question), called, result]
    function = long.with_structured_output(City, method="function_calling", strict=True)
    schema = long.with_structured_output(City, method="json_schema", strict=True)
    facts[name] = {
        "text": answer.text,
        "prompt tokens": answer.usage_metadata["input_tokens"],
        "streamed": "".join(chunk.text for chunk in chunks),
        "chunks": len(chunks),
        "call": [call["name"], call["args"]],
        "result": result.content,
        "after call": model.bind_tools([weather]).invoke(talk).usage_metadata["output_tokens"],
        "function": function.invoke(question).city,
        "schema": schema.invoke(question).city,
        "batch": [each.text for each in model.batch([question, question])],
    }

facts["completion"] = OpenAI(max_tokens=12, **server).invoke("def f(x):")
own = {"base_url": f"{url}/v1", "api_key": key, "model": "tiny"}
embeddings = OpenAIEmbeddings(check_embedding_ctx_length=False, **own)
facts["embedding"] = len(embeddings.embed_query("one"))
json.dump(facts, sys.stdout)
