"""lm-eval at its newest version: local-completions with the server's tokenizer, on tasks of this file."""

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


def run(installed: Install, url: str, folder: Path, backend: str) -> dict[str, list[dict[str, Any]]]:
    """Run both tasks; return the samples of each."""
    data = folder / "data.jsonl"
    data.write_text("".join(json.dumps(document) + "\n" for document in DOCUMENTS))
    tasks = folder / "tasks"
    tasks.mkdir()
    for name, text in (("choose", CHOOSE), ("continue", CONTINUE)):
        (tasks / f"{name}.yaml").write_text(COMMON.format(data=data) + text)
    model = f"model=tiny,base_url={url}/v1/completions,tokenizer_backend={backend},auth_token={KEY},max_length=2000"
    words = f"run --model local-completions --model_args {model} --tasks choose,continue --log_samples".split()
    places = ["--include_path", str(tasks), "--output_path", str(folder / "out")]
    installed("lm_eval[api]").run("lm_eval", *words, *places, variables={"OPENAI_API_KEY": KEY})
    files = {name: [*(folder / "out").rglob(f"samples_{name}_*.jsonl")] for name in ("choose", "continue")}
    return {name: [json.loads(line) for line in path.read_text().splitlines()] for name, (path,) in files.items()}


def loglikelihood(library: LLM, context: str, continuation: str) -> float:
    """Return the log-probability of a continuation, whose tokens are encoded with those of the context."""
    ids = library.tokenizer.encode(context + continuation)
    first = len(library.tokenizer.encode(context))
    scored = library.generate(ids, SamplingParams(max_tokens=1, prompt_logprobs=1)).prompt_logprobs
    assert scored is not None
    return sum(report[token] for token, report in zip(ids[first:], scored[first:], strict=True) if report is not None)


@pytest.mark.parametrize("backend", ["remote", "auto"])
def test_scores_and_texts_equal_those_of_the_library(
    installed: Install, url: str, library: LLM, tmp_path: Path, backend: str
) -> None:
    samples = run(installed, url, tmp_path, backend)
    for sample in samples["choose"]:
        document = sample["doc"]
        found = [float(score) for ((score, _),) in sample["resps"]]
        want = [loglikelihood(library, document["text"], f" {choice}") for choice in document["choices"]]
        assert found == pytest.approx(want, abs=1e-3)
    for sample in samples["continue"]:
        asked = SamplingParams(max_tokens=8, temperature=0.0)
        assert sample["resps"] == [[library.generate(sample["doc"]["text"], asked).text]]
