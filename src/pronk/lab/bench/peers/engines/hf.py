"""transformers on a checkpoint folder: plain decoding and prompt lookup."""

from __future__ import annotations

from time import perf_counter
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, GenerationConfig

from .contract import PeerRequest, PeerResult, WorkerConfig

# Draft tokens per step of prompt lookup, as in transformers' documentation. The n-gram length is
# its default.
_LOOKUP_TOKENS = 10


class _TimingStreamer:
    """Streamer that records when ``generate`` puts the prompt, and then the first new tokens."""

    def __init__(self) -> None:
        self.times: list[float] = []  # at most two, in seconds of ``perf_counter``

    def put(self, value: object) -> None:  # noqa: ARG002 - not used
        """Record the time of the first two calls, which are for the prompt and the first tokens."""
        if len(self.times) < 2:
            self.times.append(perf_counter())

    def end(self) -> None:
        """Do nothing; ``generate`` calls this after the last token."""


class HuggingFace:
    """The engine transformers, called by ``AutoModelForCausalLM.generate`` with token ids."""

    def load(self, config: WorkerConfig) -> dict[str, str]:
        """Load the checkpoint folder; return versions and settings by name."""
        torch.set_num_threads(config.threads)
        dtype = getattr(torch, config.dtype)
        self.model = AutoModelForCausalLM.from_pretrained(
            config.model, dtype=dtype, local_files_only=True
        ).eval()
        # The model's generation_config.json would set the stop tokens and sampling options that a
        # request leaves unset.
        self.model.generation_config = GenerationConfig()
        lookup = config.variant == "prompt_lookup"
        self.method_options = {"prompt_lookup_num_tokens": _LOOKUP_TOKENS} if lookup else {}
        notes = {
            "transformers": transformers.__version__,
            "torch": torch.__version__,
            "dtype": config.dtype,
        }
        notes["attention"] = str(self.model.config._attn_implementation)  # noqa: SLF001
        return notes | ({"lookup": f"{_LOOKUP_TOKENS} tokens"} if lookup else {})

    def generate(self, request: PeerRequest) -> PeerResult:
        """Continue one prompt; every call creates its own KV cache."""
        torch.manual_seed(request.seed)
        clock = _TimingStreamer()
        ids = torch.tensor([request.prompt])
        began = perf_counter()
        output_ids = self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            generation_config=_options(request),
            streamer=clock,
            **self.method_options,
        )
        seconds = perf_counter() - began
        tokens = output_ids[0, len(request.prompt) :].tolist()
        ttft = clock.times[1] - began if len(clock.times) > 1 else None
        return PeerResult(tokens, seconds, ttft)


def _options(request: PeerRequest) -> GenerationConfig:
    stop_ids = None if request.ignore_eos or not request.stop_token_ids else request.stop_token_ids
    sampling: dict[str, Any] = {"do_sample": False}
    if request.temperature > 0:
        sampling = {"do_sample": True, "temperature": request.temperature, "top_k": 0, "top_p": 1.0}
    return GenerationConfig(
        max_new_tokens=request.max_tokens, eos_token_id=stop_ids, pad_token_id=0, **sampling
    )
