"""Write ``llama_cpp_smollm2.json``: what llama.cpp computes for SmolLM2, the oracle of
``test_agreement.py``.

    python tests/real/make_llama_cpp_fixture.py

llama-cpp-python renders its conversations with the template of the file, so this tests templates,
too. For each question the fixture has the token ids of the prompt, the 50 most probable next tokens
with their log-probabilities by llama.cpp, and those tokens' log-probabilities in float32, computed
by torch on the dequantized weights.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import llama_cpp
import numpy as np
import torch
from llama_cpp.llama_chat_format import Jinja2ChatFormatter

sys.path.insert(0, str(Path(__file__).parent))
from agreement import log_softmax
from questions import QUESTIONS, conversation

from pronk.models.loader import read_config
from pronk.models.resolve import resolve_model
from pronk.train.attention import dense_logits
from pronk.train.modules.decoder import DecoderModule, load_module

TOP = 50


@torch.no_grad()
def dense_last_logits(module: DecoderModule, ids: list[int]) -> np.ndarray:
    """Return the logits of the token after ``ids``, ``[vocab]``, with weights in float32."""
    return dense_logits(module, torch.tensor([ids]))[-1].double().numpy()


def main() -> None:
    """Write the fixture."""
    path = resolve_model("smollm2")
    llama = llama_cpp.Llama(
        str(path), n_ctx=512, n_threads=2, logits_all=False, verbose=False, flash_attn=False
    )
    bos, eos = (
        llama.detokenize([token], special=True).decode()
        for token in (llama.token_bos(), llama.token_eos())
    )
    template = llama.metadata["tokenizer.chat_template"]
    formatter = Jinja2ChatFormatter(template=template, eos_token=eos, bos_token=bos)
    config = read_config(path)
    reference = load_module(path, config, torch.float32, torch.device("cpu"))
    rows = []
    for question in QUESTIONS:
        text = formatter(messages=conversation(question)).prompt
        ids = llama.tokenize(text.encode(), add_bos=False, special=True)
        llama.reset()
        llama.eval(ids)
        logits = np.ctypeslib.as_array(
            llama_cpp.llama_get_logits_ith(llama.ctx, -1), (llama.n_vocab(),)
        )
        theirs = log_softmax(logits.astype(np.float64))
        top = np.argsort(-theirs, kind="stable")[:TOP]
        exact = log_softmax(dense_last_logits(reference, ids))
        rows.append(
            {
                "question": question,
                "prompt": ids,
                "top": top.tolist(),
                "llama_cpp": [round(float(theirs[token]), 5) for token in top],
                "float32": [round(float(exact[token]), 5) for token in top],
            }
        )
    version = {"llama_cpp_python": llama_cpp.__version__, "torch": torch.__version__}
    target = Path(__file__).parent / "llama_cpp_smollm2.json"
    target.write_text(
        json.dumps(
            {"command": "python tests/real/make_llama_cpp_fixture.py", **version, "rows": rows}
        )
    )


if __name__ == "__main__":
    main()
