"""``/tokenizer_info``: what clients need to build prompts, and nothing else of a model's files."""

import json
import shutil
from collections.abc import Iterator

import httpx
import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment

from pronk.llm import LLM
from server.serving import Running, running
from server.tool_models import TINY

TOKENS = {f"{name}_token" for name in ("bos", "eos", "unk", "pad", "sep", "cls", "mask")}


@pytest.fixture(scope="module")
def secret(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """Serve a copy of pronk-tiny whose files have an access token, and no chat template."""
    folder = tmp_path_factory.mktemp("secret") / "model"
    shutil.copytree(TINY, folder, ignore=shutil.ignore_patterns("datastore"))
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    del config["chat_template"]
    config |= {
        "auth_token": "SECRET",
        "hub_token": {"content": "SECRET"},
        "name_or_path": "/home/SECRET",
    }
    path.write_text(json.dumps(config), encoding="utf-8")
    with running(LLM(folder, threads=1)) as made:
        yield made


def test_texts_of_the_models_files(client: httpx.Client, model: LLM) -> None:
    found = client.get("/tokenizer_info").json()
    config = json.loads((model.path / "tokenizer_config.json").read_text(encoding="utf-8"))
    assert found.keys() == TOKENS | {"tokenizer_class", "chat_template", "model_max_length"}
    assert {name: found[name] for name in TOKENS} == {name: config.get(name) for name in TOKENS}
    assert found["chat_template"] == config["chat_template"]
    assert found["tokenizer_class"] == config["tokenizer_class"]
    assert found["model_max_length"] == model.config.context


def test_the_template_gives_the_prompt_of_the_server(client: httpx.Client) -> None:
    info = client.get("/tokenizer_info").json()
    messages = [{"role": "user", "content": "Say hello, please."}]
    template = ImmutableSandboxedEnvironment().from_string(info["chat_template"])
    variables = {"add_generation_prompt": True, "bos_token": info["bos_token"]}
    prompt = template.render(messages=messages, **variables)
    bodies = ({"prompt": prompt, "add_special_tokens": False}, {"messages": messages})
    own, server = (client.post("/tokenize", json=body).json()["tokens"] for body in bodies)
    assert own == server


def test_nothing_else_is_published(secret: Running) -> None:
    with secret.client() as client:
        answer = client.get("/tokenizer_info")
    assert "SECRET" not in answer.text
    assert answer.json()["chat_template"] is None


def test_key_and_name_of_the_model(served: Running) -> None:
    with httpx.Client(base_url=served.url) as stranger:
        assert stranger.get("/tokenizer_info").status_code == 401
    with served.client() as client:
        assert client.get("/tokenizer_info", params={"model": "tiny"}).status_code == 200
        answer = client.get("/tokenizer_info", params={"model": "huge"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")
