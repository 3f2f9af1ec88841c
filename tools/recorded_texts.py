"""Record tokens and log-probabilities of many settings, before and after a change of the engine.

    python tools/recorded_texts.py heads HEADS                     # train drafters (minutes)
    python tools/recorded_texts.py record old.jsonl --heads HEADS  # one line per setting
    python tools/recorded_texts.py compare old.jsonl new.jsonl     # status 1 if two lines differ
    python tools/recorded_texts.py list                            # write recorded_texts.json anew

A setting is a model, options of the model, a drafter, sampling options and prompts. The settings
are in ``recorded_texts.json``; the drafters are trained for pronk-tiny. ``budget="all"`` makes the
number of draft tokens a function of the text alone, so that the rules ``rejection`` and ``block``,
whose texts depend on the draft tokens, can be compared, too.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from pronk import LLM, Completion, Guide, PronkError, SamplingParams

ROOT = Path(__file__).parents[1]
SETTINGS = Path(__file__).with_suffix(".json")
HEADS = "HEADS"  # stands for the folder of trained drafters in a drafter's specification

PROMPTS = {
    "question": "What is gravity? Answer in one sentence.",
    "code": (
        "def area(width, height):\n    return width * height\n\n\ndef volume(width, height, "
        "depth):\n    return"
    ),
    "list": "1. one\n2. two\n3. three\n4. four\n5.",
    "long": "The quick brown fox jumps over the lazy dog. " * 30 + "The quick brown",
}
_PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer"}},
}
_SAMPLED = {"temperature": 0.8, "seed": 11}
SAMPLING: Mapping[str, Mapping[str, Any]] = {
    "greedy": {},
    "sampled": _SAMPLED,
    "truncated": {"temperature": 1.2, "seed": 5, "top_k": 40, "top_p": 0.95, "min_p": 0.02},
    "penalties": {
        "temperature": 0.7,
        "seed": 3,
        "repetition_penalty": 1.2,
        "presence_penalty": 0.4,
        "frequency_penalty": 0.3,
    },
    "bias": {"logit_bias": {"198": 4.0, "216": -100.0}, "bad_words": ["the"], "min_tokens": 8},
    "stop": {"stop": ["\n\n", ". "], "ignore_eos": True},
    "object": {**_SAMPLED, "guide": {"json": {**_PERSON, "required": ["name", "age"]}}},
    "expression": {"guide": {"regex": "[a-z ]{10,60}\\."}, "guide_mode": "plain"},
    "samples": {**_SAMPLED, "n": 3, "prompt_logprobs": 1},
    "rejection": {**_SAMPLED, "rule": "rejection"},
    "block": {**_SAMPLED, "rule": "block"},
}
MODELS: Mapping[str, Mapping[str, Any]] = {
    "plain": {},
    "int8 cache": {"kv_dtype": "int8"},
    "prefixes": {"prefix_cache": True, "kv_memory": "24MiB", "max_batch": 4},
    "int8 weights": {"weights": "int8"},
    "small steps": {"prefill_chunk": 16, "max_batch": 2},
    "workers": {"workers": 2},
}
_DRAFT = 'draft_model(model="pronk-tiny")'
_TEXT_DRAFTERS = (
    "autoregressive",
    "jacobi",
    "gauss_seidel",
    "lookahead",
    "prompt_lookup(min_ngram=1)",
    "suffix",
    "recycling",
    "merged(prompt_lookup, recycling)",
    "first_of(suffix, lookahead)",
    "auto",
    "grammar",
)
_REAL_DRAFTERS = (
    *_TEXT_DRAFTERS,
    "eagle3",
    "eagle3(num_tokens=4, num_nodes=12)",
    "cape(eagle3)",
    f"staged({_DRAFT}, suffix)",
    f"merged({_DRAFT}, suffix)",
    f"threshold({_DRAFT})",
    f"beam({_DRAFT}, width=3)",
    f"cape(threshold({_DRAFT}))",
)
# Kind of drafter and options of ``pronk train``, by name of the trained drafter.
_TRAINED = {
    "kangaroo": "kangaroo",
    "medusa": "medusa",
    "multi_token": "heads",
    "glide": "glide",
    "vanilla": "glide --vanilla",
    "mtp": "eagle3 --kind mtp",
    "eagle3": "eagle3",
    "draft_model": "draft",
}
_TINY_DRAFTERS = (
    *_TEXT_DRAFTERS,
    *(f'{name}(model="{HEADS}/{name}/export")' for name in _TRAINED),
    f'retrieval(datastore="{HEADS}/datastore", min_match=1)',
    f'staged(draft_model(model="{HEADS}/draft_model/export"), suffix)',
    f'threshold(draft_model(model="{HEADS}/draft_model/export"))',
    f'beam(draft_model(model="{HEADS}/draft_model/export"), width=3)',
    f'cape(kangaroo(model="{HEADS}/kangaroo/export"))',
    f'merged(medusa(model="{HEADS}/medusa/export"), kangaroo(model="{HEADS}/kangaroo/export"))',
)


@dataclass(frozen=True)
class Setting:
    """One setting to record."""

    model: str
    options: str  # name of options of the model in ``MODELS``
    drafter: str
    sampling: str  # name of sampling options in ``SAMPLING``
    prompt: str  # name of a prompt in ``PROMPTS``, or "batch" for all prompts at once

    @property
    def key(self) -> str:
        """Text that names the setting in the files of results."""
        return f"{self.model} | {self.options} | {self.drafter} | {self.sampling} | {self.prompt}"


def choose_settings() -> Iterator[Setting]:
    """Yield settings in which every pair of values of two options occurs, by options of models."""
    sys.path.insert(0, str(ROOT / "tests"))
    from covering import covering_array  # noqa: PLC0415 - the tests need not be installed

    for model, drafters in (("smollm2", _REAL_DRAFTERS), ("pronk-tiny", _TINY_DRAFTERS)):
        factors = ((*MODELS,), drafters, (*SAMPLING,), (*PROMPTS, "batch"))
        cases = covering_array([len(values) for values in factors], 2)
        for case in sorted(cases):
            values = [choices[number] for choices, number in zip(factors, case, strict=True)]
            yield Setting(model, *values)


def write_settings(settings: list[Setting]) -> int:
    """Write ``recorded_texts.json``, and return the number of settings.

    The file has a list for each model with its options, and in it a line for each setting.
    """
    groups = list[str]()
    for (model, options), group in groupby(settings, lambda each: (each.model, each.options)):
        rows = [json.dumps([each.drafter, each.sampling, each.prompt]) for each in group]
        lines = ",\n".join(rows)
        groups.append(f"[{json.dumps(model)}, {json.dumps(options)}, [\n{lines}\n]]")
    SETTINGS.write_text("[\n" + ",\n".join(groups) + "\n]\n", encoding="utf-8")
    return len(settings)


def read_settings() -> list[Setting]:
    """Return the settings in ``recorded_texts.json``."""
    groups = json.loads(SETTINGS.read_text(encoding="utf-8"))
    return [Setting(model, options, *each) for model, options, lines in groups for each in lines]


def params_of(name: str) -> SamplingParams:
    """Return the sampling parameters with a name in ``SAMPLING``."""
    options: dict[str, Any] = {"max_tokens": 24, "logprobs": 2, **SAMPLING[name]}
    if "guide" in options:
        options["guide"] = Guide(**options["guide"])
    if "logit_bias" in options:
        biases = options["logit_bias"].items()
        options["logit_bias"] = {int(token): bias for token, bias in biases}
    return SamplingParams(**options)


def record(path: Path, heads: Path, models: list[str]) -> None:
    """Append the results of each setting that the file does not have yet, one line per setting."""
    wanted = [each for each in read_settings() if each.model in models]
    done = set(read(path)) if path.exists() else set[str]()
    with path.open("a", encoding="utf-8") as file:
        for (model, options), group in groupby(wanted, lambda each: (each.model, each.options)):
            missing = [each for each in group if each.key not in done]
            if not missing:
                continue
            print(f"{model}, {options}: {len(missing)} settings", file=sys.stderr)
            llm = LLM(model, threads=1, calibration=False, budget="all", **MODELS[options])
            for setting in missing:
                line = {"setting": setting.key, "results": run(llm, setting, heads)}
                file.write(json.dumps(line) + "\n")
                file.flush()
            llm.close()


def run(llm: LLM, setting: Setting, heads: Path) -> list[dict[str, Any]]:
    """Return the results of a setting, or the message of the error that refuses the setting."""
    texts = [*PROMPTS.values()] if setting.prompt == "batch" else [PROMPTS[setting.prompt]]
    drafter = setting.drafter.replace(HEADS, str(heads))
    try:
        found = llm.generate(texts, params_of(setting.sampling), drafter=drafter)
    except PronkError as error:
        return [{"refused": str(error).replace(str(heads), HEADS)}]
    return [to_json(each) for first in found for each in (first, *first.others)]


def to_json(completion: Completion) -> dict[str, Any]:
    """Return the values of a completion that must not change, and its numbers of draft tokens."""
    return {
        "tokens": completion.token_ids,
        "text": completion.text,
        "finish": [completion.finish_reason, completion.stop_reason],
        "logprobs": [exact(each) for each in completion.logprobs or ()],
        "prompt_logprobs": [exact(each or {}) for each in completion.prompt_logprobs or ()],
        "drafted": completion.stats.drafted,
        "accepted": completion.stats.accepted,
    }


def exact(logprobs: Mapping[int, float]) -> dict[str, str]:
    """Return log-probabilities by token as hexadecimal numbers, which keep every bit."""
    return {str(token): float(value).hex() for token, value in sorted(logprobs.items())}


def read(path: Path) -> dict[str, list[dict[str, Any]]]:
    """Return the results of a file by setting."""
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return {line["setting"]: line["results"] for line in lines}


def compare(old_path: Path, new_path: Path) -> int:
    """Print the differences between two files of results, and return their number.

    Numbers of draft tokens may differ. The sum of accepted draft tokens of each drafter is printed,
    which shows that the drafter has drafted.
    """
    old = read(old_path)
    new = read(new_path)
    count = 0
    for key in sorted(old.keys() | new.keys()):
        if key not in old or key not in new:
            print(f"{key}: only in {old_path if key in old else new_path}")
            count += 1
            continue
        for number, (before, after) in enumerate(zip(old[key], new[key], strict=True)):
            names = (before.keys() | after.keys()) - {"drafted", "accepted"}
            fields = [name for name in sorted(names) if before.get(name) != after.get(name)]
            if fields:
                print(f"{key}, result {number}: other {', '.join(fields)}")
                count += 1
    accepted = Counter[str]()
    for key, results in new.items():
        accepted[key.split(" | ")[2]] += sum(result.get("accepted", 0) for result in results)
    print(f"{len(new)} settings, {count} differences; accepted draft tokens by drafter:")
    for drafter, number in accepted.items():
        print(f"{number:6} {drafter}")
    return count


def train_heads(folder: Path) -> None:
    """Train drafters of all kinds for pronk-tiny, for a few steps, and build a datastore."""
    source = folder / "source"
    answers = folder / "answers"
    store = folder / "datastore"
    source.mkdir(parents=True, exist_ok=True)
    for name in ("llm.py", "engine/outputs.py", "base/errors.py"):
        code = (ROOT / "src" / "pronk" / name).read_text(encoding="utf-8")
        (source / Path(name).name).write_text(code, encoding="utf-8")
    run_pronk("train texts --model pronk-tiny --tokens 8000", "--data", source, "--out", answers)
    for name, kind in _TRAINED.items():
        if (folder / name / "export").exists():
            continue
        command = f"train {kind} --batch 512 --micro 512 --length 128"
        if kind.startswith("eagle3"):
            command = f"{command} --model pronk-tiny --epochs 1"
            run_pronk(command, "--data", answers, "--out", folder / name)
        else:
            command = f"{command} --target pronk-tiny --final-length 128 --steps 20"
            command = f"{command} --on-policy 0 --dialogues 0"
            run_pronk(command, "--source", f"{source}=1", "--out", folder / name)
    if not store.exists():
        run_pronk("datastore build --model pronk-tiny", store, source)


def run_pronk(command: str, *arguments: str | Path) -> None:
    """Run a command of pronk, followed by further arguments, to its end."""
    words = [*command.split(), *map(str, arguments)]
    subprocess.run([sys.executable, "-m", "pronk", *words], check=True)  # noqa: S603 - own commands


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("list", help="write the list of settings")
    trainer = commands.add_parser("heads", help="train drafters for pronk-tiny")
    trainer.add_argument("folder", type=Path)
    recorder = commands.add_parser("record", help="append the results of all settings to a file")
    recorder.add_argument("file", type=Path)
    recorder.add_argument("--heads", type=Path, required=True, help="folder of `heads`")
    recorder.add_argument(
        "--model", action="append", choices=("smollm2", "pronk-tiny"), help="by default both"
    )
    comparison = commands.add_parser("compare", help="compare two files")
    comparison.add_argument("old", type=Path)
    comparison.add_argument("new", type=Path)
    options = parser.parse_args()
    if options.command == "list":
        print(f"{write_settings([*choose_settings()])} settings in {SETTINGS.name}")
    elif options.command == "heads":
        train_heads(options.folder)
    elif options.command == "record":
        record(options.file, options.heads, options.model or ["smollm2", "pronk-tiny"])
    else:
        raise SystemExit(compare(options.old, options.new) > 0)


if __name__ == "__main__":
    main()
