"""``pronk ps``: the loaded models of a server."""

import json

from command_line import Command, assert_mistake
from pronk.llm import LLM
from server.serving import KEY, running


def test_ps_lists_the_models_of_a_server(command: Command) -> None:
    with running(LLM(threads=1), keys=(KEY,)) as server:
        call = ("ps", "--url", server.url, "--api-key", KEY)
        code, out, _ = command(*call)
        assert code == 0
        assert out.split()[0] == "name"
        assert "tiny" in out
        assert "2048" in out
        found = json.loads(command(*call, "--json")[1])
        assert [each["context_length"] for each in found] == [2048]
        assert_mistake(command("ps", "--url", server.url), "ps", "401")
