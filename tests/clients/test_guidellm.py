"""guidellm at its newest version: a benchmark of each route that generates text."""

import json
from pathlib import Path

import pytest

from clients.conftest import Install
from server.serving import KEY

pytestmark = pytest.mark.slow

PROMPT = 40
OUTPUT = 12
REQUESTS = 3


@pytest.mark.parametrize("route", ["/v1/completions", "/v1/chat/completions", "/v1/responses"])
def test_benchmark(installed: Install, url: str, folder: Path, tmp_path: Path, route: str) -> None:
    backend = f"kind=openai_http,target={url},model=tiny,api_key={KEY},request_format={route}"
    report = tmp_path / "report.json"
    options = {
        "backend": backend,
        "profile": "kind=synchronous",
        "constraint": f"kind=max_requests,count={REQUESTS}",
        "data": f"kind=synthetic_text,prompt_tokens={PROMPT},output_tokens={OUTPUT}",
        "tokenizer": f"kind=hf_auto,model={folder}",
        "output": f"kind=json,path={report}",
    }
    words = [word for name, value in options.items() for word in (f"--{name}", value)]
    environment = installed("guidellm", lends_torch=True)
    environment.run("guidellm", "run", *words, "--disable-console")
    (benchmark,) = json.loads(report.read_text())["benchmarks"]
    requests = benchmark["requests"]
    assert (len(requests["successful"]), requests["errored"]) == (REQUESTS, [])
    for request in requests["successful"]:
        assert request["output_metrics"]["text_tokens"] == OUTPUT
        assert request["input_metrics"]["text_tokens"] >= PROMPT
