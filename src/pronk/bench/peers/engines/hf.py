"""transformers: plain, with prompt lookup, and with a draft model."""

from __future__ import annotations

from time import perf_counter
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, GenerationConfig

from .contract import Generated, Loaded, PeerRequest, Unsupported, WorkerConfig

__all__ = ["HuggingFace"]

# The value of the library's own documentation; the longest n-gram to look up stays at its default.
_LOOKUP_TOKENS = 10


class _Clock:
    """A streamer that notes when the first new tokens arrive; the first thing it is given is the prompt."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: object) -> None:  # noqa: ARG002 - the protocol's
        """Note the time of one delivery."""
        if len(self.times) < 2:
            self.times.append(perf_counter())

    def end(self) -> None:
        """Nothing to flush."""


class HuggingFace:
    """``AutoModelForCausalLM.generate`` on the checkpoint as it is."""

    def prepare(self, config: WorkerConfig) -> None:
        """Nothing to convert."""

    def load(self, config: WorkerConfig) -> Loaded:
        """Load the model, and the draft model if the variant has one."""
        torch.set_num_threads(config.threads)
        self.model = self._model(config, str(config.checkpoint))
        self.extra: dict[str, Any] = {}
        if config.variant == "prompt_lookup":
            self.extra = {"prompt_lookup_num_tokens": _LOOKUP_TOKENS}
        elif config.variant == "assisted":
            if config.draft is None:
                msg = "expected a draft model"
                raise Unsupported(msg)
            self.extra = {"assistant_model": self._model(config, str(config.draft))}
        versions = {"transformers": transformers.__version__, "torch": torch.__version__}
        settings = {"dtype": config.dtype, "attention": str(self.model.config._attn_implementation)}  # noqa: SLF001
        if config.variant == "prompt_lookup":
            settings["lookup"] = f"{_LOOKUP_TOKENS} tokens"
        return Loaded(versions, settings)

    def generate(self, request: PeerRequest) -> Generated:
        """Continue one prompt; every call makes its own cache."""
        torch.manual_seed(request.seed)
        clock = _Clock()
        ids = torch.tensor([request.prompt])
        began = perf_counter()
        out = self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            generation_config=_options(request),
            streamer=clock,
            **self.extra,
        )
        seconds = perf_counter() - began
        tokens = out[0, len(request.prompt) :].tolist()
        return Generated(tokens, seconds, clock.times[1] - began if len(clock.times) > 1 else None)

    def _model(self, config: WorkerConfig, path: str) -> Any:
        dtype = getattr(torch, config.dtype)
        model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, local_files_only=True).eval()
        # What generation_config.json asks for (its end tokens, its sampling) must not fill in what a request omits.
        model.generation_config = GenerationConfig()
        return model


def _options(request: PeerRequest) -> GenerationConfig:
    ends = None if request.ignore_eos or not request.ends else request.ends
    sampling: dict[str, Any] = {"do_sample": False}
    if request.temperature > 0:
        sampling = {"do_sample": True, "temperature": request.temperature, "top_k": 0, "top_p": 1.0}
    return GenerationConfig(max_new_tokens=request.max_tokens, eos_token_id=ends, pad_token_id=0, **sampling)
