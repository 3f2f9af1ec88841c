"""lm-eval at its newest version: local-completions with the server's tokenizer."""

import json
from pathlib import Path
from typing import Any

import pytest

from clients.conftest import Install
from pronk.llm import LLM
from pronk.sampling.params import SamplingParams
from server.serving import KEY

pytestmark = pytest.mark.slow

DOCUMENTS = [
    {"text": "The capital of Norway is", "choices": ["Oslo", "a very cold place"], "label": 0},
    {"text": "def add(a, b):\n    return", "choices": ["a + b", "None"], "label": 0},
]
COMMON = """
dataset_path: json
dataset_kwargs: {{data_files: {{test: "{data}"}}}}
test_split: test
doc_to_text: "{{{{text}}}}"
"""
CHOOSE = """
task: choose
output_type: multiple_choice
doc_to_choice: "{{choices}}"
doc_to_target: label
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
"""
CONTINUE = """
task: continue
output_type: generate_until
doc_to_target: "{{choices[0]}}"
generation_kwargs: {until: ["zq"], max_gen_toks: 8, do_sample: false, temperature: 0.0}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
"""


Samples = dict[str, list[dict[str, Any]]]


def run(installed: Install, url: str, folder: Path, backend: str) -> Samples:
    """Run both tasks; return the samples of each."""
    data = folder / "data.jsonl"
    data.write_text("".join(json.dumps(document) + "\n" for document in DOCUMENTS))
    tasks = folder / "tasks"
    tasks.mkdir()
    for name, text in (("choose", CHOOSE), ("continue", CONTINUE)):
        (tasks / f"{name}.yaml").write_text(COMMON.format(data=data) + text)
    server = {"model": "tiny", "base_url": f"{url}/v1/completions", "auth_token": KEY}
    server |= {"tokenizer_backend": backend, "max_length": "2000"}
    options = {
        "model": "local-completions",
        "model_args": ",".join(f"{name}={value}" for name, value in server.items()),
        "tasks": "choose,continue",
        "include_path": str(tasks),
        "output_path": str(folder / "out"),
    }
    words = [word for name, value in options.items() for word in (f"--{name}", value)]
    environment = installed("lm_eval[api]")
    environment.run("lm_eval", "run", *words, "--log_samples", variables={"OPENAI_API_KEY": KEY})
    return {name: samples(folder / "out", name) for name in ("choose", "continue")}


def samples(folder: Path, task: str) -> list[dict[str, Any]]:
    """Return the samples that lm-eval has logged for a task."""
    (path,) = folder.rglob(f"samples_{task}_*.jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()]


def loglikelihood(library: LLM, context: str, continuation: str) -> float:
    """Return the log-probability of a continuation, encoded together with its context."""
    ids = library.tokenizer.encode(context + continuation)
    first = len(library.tokenizer.encode(context))
    scored = library.generate(ids, SamplingParams(max_tokens=1, prompt_logprobs=1)).prompt_logprobs
    assert scored is not None
    reports = [report or {} for report in scored[first:]]
    return sum(report[token] for token, report in zip(ids[first:], reports, strict=True))


@pytest.mark.parametrize("backend", ["remote", "auto"])
def test_scores_and_texts_equal_those_of_the_library(
    installed: Install, url: str, library: LLM, tmp_path: Path, backend: str
) -> None:
    found = run(installed, url, tmp_path, backend)
    for sample in found["choose"]:
        text = sample["doc"]["text"]
        choices = sample["doc"]["choices"]
        scores = [float(score) for ((score, _),) in sample["resps"]]
        want = [loglikelihood(library, text, f" {choice}") for choice in choices]
        assert scores == pytest.approx(want, abs=1e-3)
    for sample in found["continue"]:
        asked = SamplingParams(max_tokens=8, temperature=0.0)
        assert sample["resps"] == [[library.generate(sample["doc"]["text"], asked).text]]
