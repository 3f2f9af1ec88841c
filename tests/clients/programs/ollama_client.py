"""Use Ollama's client: models, chats, tools, embeddings, pulls; print what it returned."""

import json
import sys

import ollama

url, key = sys.argv[1:]
client = ollama.Client(host=url, headers={"Authorization": f"Bearer {key}"})
question = "Say hello, please."
messages = [{"role": "user", "content": question}]
options = {"temperature": 0, "num_predict": 12}


def get_weather(city: str) -> str:
    """Return the weather of a city.

    Args:
        city: name of the city.
    """
    return f"rain in {city}"


def listed() -> list[str]:
    """Return the names of the models."""
    return [each.model for each in client.list().models]


def pull(name: str) -> list[str]:
    """Pull a model; return the states.

    The server waits ten seconds for the Hub's first answer. A busy machine may need longer.
    """
    for _ in range(20):
        try:
            return [part.status for part in client.pull(name, stream=True)]
        except ollama.ResponseError as error:
            if "no answer within" not in error.error:
                raise
    raise TimeoutError(name)


facts = {"listed": listed()}
facts["chat"] = client.chat("tiny", messages, options=options).message.content
facts["loaded"] = [each.model for each in client.ps().models]
facts["capabilities"] = client.show("tiny").capabilities
parts = [*client.chat("tiny", messages, options=options, stream=True)]
facts["streamed"] = "".join(part.message.content for part in parts)
facts["chunks"] = len(parts)
facts["last"] = [parts[-1].done, parts[-1].eval_count]
facts["generated"] = client.generate("tiny", question, options=options).response
called = client.chat("tiny", messages, tools=[get_weather], options={"num_predict": 60})
calls = called.message.tool_calls or ()
facts["calls"] = [[call.function.name, call.function.arguments] for call in calls]
facts["embeddings"] = [len(vector) for vector in client.embed("tiny", ["a", "b"]).embeddings]
facts["statuses"] = pull("o/tiny")
facts["pulled"] = client.pull("o/tiny").status
facts["listed after"] = listed()
facts["of the pulled model"] = client.chat("o/tiny", messages, options=options).message.content
try:
    pull("o/absent")
except ollama.ResponseError as error:
    facts["refused"] = error.error
json.dump(facts, sys.stdout)
