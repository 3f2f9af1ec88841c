r"""Greedy answers that part in 16 bits (lookahead decoding, Fu et al. 2024, appendix E).

    python benchmarks/papers/half_precision.py MODEL.gguf --prompts spec_bench.jsonl \
        --suites mt_bench qa math_reasoning translation --per-suite 5 --out half-precision

In exact arithmetic, speculative decoding generates the tokens of greedy search. In 16 bits, the
logits of a row may depend on the number of rows of the forward pass, and where two tokens are
nearly equally likely, the answers part. The script counts such answers:

- transformers in bfloat16 and in float32: prompt lookup, and assisted generation, each against
  greedy search with the same dtype; and greedy search in bfloat16 against float32.
- pronk in bfloat16: prompt lookup, and a draft model, each against plain decoding.

The draft model is the target itself, so that most of its tokens are accepted. A GGUF file is
dequantized to bfloat16 first; both libraries read this copy. The counts need no quiet machine.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from time import strftime

import torch
from measuring import PLAIN, markdown
from policy import read_prompts
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from pronk import LLM, SamplingParams
from pronk.base.files.results import save_result
from pronk.lab.bench.machine import describe_hardware

LOOKUP_TOKENS = 10  # draft tokens of prompt lookup per step
ASSISTANT_TOKENS = 5  # draft tokens of the assistant per step
# Answers of the paper's 160 that part from greedy search in float32: of greedy search in float16,
# and of lookahead in float32.
PAPER_GREEDY = "35 to 42 of 160"
PAPER_FLOAT = "0 of 160"

Texts = list[list[int]]


def dequantized(file: Path, folder: Path) -> Path:
    """Write a copy of a GGUF file in bfloat16 to ``folder``, with its tokenizer."""
    config = AutoConfig.from_pretrained(file.parent, gguf_file=file.name)
    model = AutoModelForCausalLM.from_config(config)
    read = load_gguf_checkpoint(str(file), return_tensors=True, model_to_load=model)
    missing = model.load_state_dict(read["tensors"], strict=False).missing_keys
    if set(missing) - {"lm_head.weight"}:  # a tied head is the embedding
        sys.exit(f"half_precision: expected all weights in {file.name}, found none of {missing}")
    model.to(torch.bfloat16).save_pretrained(folder)
    AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(folder)
    return folder


def parted(base: Texts, others: Texts) -> int:
    """Return how many texts differ from those at the same place in ``base``."""
    return sum(own != other for own, other in zip(base, others, strict=True))


def transformers_texts(
    folder: Path, prompts: Texts, tokens: int, dtype: torch.dtype
) -> dict[str, Texts]:
    """Return the outputs of transformers by method, each of at most ``tokens`` token ids.

    Args:
        folder: folder of the checkpoint.
        prompts: token ids of the prompts.
        tokens: maximum number of tokens of an output.
        dtype: dtype of the weights and of all computation.
    """
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    assistant = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    assistant.generation_config.update(
        num_assistant_tokens=ASSISTANT_TOKENS,
        num_assistant_tokens_schedule="constant",
        assistant_confidence_threshold=0.0,
    )
    methods = {
        "greedy": {},
        "prompt lookup": {"prompt_lookup_num_tokens": LOOKUP_TOKENS},
        "assisted": {"assistant_model": assistant},
    }
    found: dict[str, Texts] = {name: [] for name in methods}
    for prompt in prompts:
        ids = torch.tensor([prompt])
        for name, method in methods.items():
            output = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=tokens,
                **method,
            )
            found[name].append(output[0, len(prompt) :].tolist())
    return found


def pronk_texts(llm: LLM, prompts: Texts, tokens: int, drafters: Sequence[str]) -> dict[str, Texts]:
    """Return pronk's outputs by drafter, each of at most ``tokens`` token ids."""
    params = SamplingParams(max_tokens=tokens)
    return {
        drafter: [
            list(llm.generate(prompt, params, drafter=drafter).token_ids) for prompt in prompts
        ]
        for drafter in drafters
    }


def main(words: Sequence[str] | None = None) -> None:
    """Decode the prompts, and write the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path, help="GGUF file, or folder of a checkpoint")
    parser.add_argument("--prompts", type=Path, nargs="+", required=True)
    parser.add_argument("--per-suite", type=int, default=5)
    parser.add_argument("--suites", nargs="+", help="names of the suites; by default all")
    parser.add_argument("--tokens", type=int, default=64, help="longest answer")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", help="file name without ending, for .md and .json")
    options = parser.parse_intermixed_args(words)
    torch.set_num_threads(options.threads)
    texts = [
        prompt.text
        for prompt in read_prompts(options.prompts, options.per_suite)
        if options.suites is None or prompt.suite in options.suites
    ]
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.model
        if folder.is_file():
            folder = dequantized(options.model, Path(temporary) / options.model.stem)
        llm = LLM(folder, dtype="bfloat16", drafter=PLAIN, budget="all", threads=options.threads)
        prompts = [llm.chat_ids([{"role": "user", "content": text}]) for text in texts]
        drafters = {
            "prompt lookup": "prompt_lookup",
            "draft model": f"draft_model(model={str(folder)!r}, num_tokens={ASSISTANT_TOKENS})",
        }
        own = pronk_texts(llm, prompts, options.tokens, [PLAIN, *drafters.values()])
        del llm
        half = transformers_texts(folder, prompts, options.tokens, torch.bfloat16)
        full = transformers_texts(folder, prompts, options.tokens, torch.float32)
    counts: list[tuple[str, int, str]] = [
        ("pronk, bfloat16: prompt lookup", parted(own[PLAIN], own[drafters["prompt lookup"]]), ""),
        ("pronk, bfloat16: a draft model", parted(own[PLAIN], own[drafters["draft model"]]), ""),
    ]
    for name, found, paper in (("bfloat16", half, ""), ("float32", full, PAPER_FLOAT)):
        for method in ("prompt lookup", "assisted"):
            count = parted(found["greedy"], found[method])
            counts.append((f"transformers, {name}: {method}", count, paper))
    greedy = parted(full["greedy"], half["greedy"])
    counts.append(("transformers: greedy in bfloat16, not float32", greedy, PAPER_GREEDY))
    rows = [[name, f"{count} of {len(prompts)}", paper] for name, count, paper in counts]
    table = markdown(["answers that part from greedy search", "count", "paper's"], rows)
    processor = describe_hardware("cpu")["processor"]
    head = f"{options.model.name}; {processor}, {strftime('%B %Y')}"
    head += f"; {len(prompts)} prompts, at most {options.tokens} tokens each"
    print(f"{head}\n\n{table}")
    if options.out is not None:
        document = {"head": head, "counts": [list(each) for each in counts]}
        save_result("out", Path(f"{options.out}.json"), json.dumps(document))
        save_result(
            "out", Path(f"{options.out}.md"), f"# Greedy answers in 16 bits\n\n{head}\n\n{table}\n"
        )


if __name__ == "__main__":
    main()
