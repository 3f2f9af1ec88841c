"""OpenVINO GenAI on a GGUF file: plain decoding and prompt lookup."""

from __future__ import annotations

from time import perf_counter
from typing import Any

import numpy as np
import openvino as ov
import openvino_genai as genai

from .contract import PeerRequest, PeerResult, WorkerConfig

_LOOKUP_TOKENS = 5  # number of draft tokens per step, as in the samples of OpenVINO GenAI
_LOOKUP_NGRAM = 3  # maximum n-gram length, as in the samples of OpenVINO GenAI

# For each data type: OpenVINO's name of the type, and OpenVINO's name of a CPU's capability to
# compute in the type.
_DTYPES = {"bfloat16": ("bf16", "BF16"), "float16": ("f16", "FP16"), "float32": ("f32", "FP32")}


class OpenVino:
    """The engine OpenVINO GenAI, called by ``LLMPipeline.generate`` with token ids."""

    def load(self, config: WorkerConfig) -> dict[str, str]:
        """Read the GGUF file and compile the model, with a KV cache that is not quantized."""
        self.lookup = config.variant == "prompt_lookup"
        properties = _properties(config)
        scheduler = genai.SchedulerConfig()
        scheduler.enable_prefix_caching = False
        # Process a prompt in one forward pass, as a pipeline without a scheduler config does.
        scheduler.max_num_batched_tokens = 2**31 - 1
        extra: dict[str, Any] = {"prompt_lookup": True} if self.lookup else {}
        self.pipeline = genai.LLMPipeline(
            config.model, "CPU", scheduler_config=scheduler, **extra, **properties
        )
        notes = {"openvino": ov.__version__, "openvino-genai": genai.__version__}
        notes |= {key.lower(): str(value) for key, value in properties.items()}
        notes["backend"] = "paged attention"
        if self.lookup:
            notes["lookup"] = f"{_LOOKUP_TOKENS} tokens, n-grams up to {_LOOKUP_NGRAM}"
        return notes

    def generate(self, request: PeerRequest) -> PeerResult:
        """Continue one prompt from an empty KV cache (prefix caching is off)."""
        options = self._options(request)
        ids = ov.Tensor(np.array([request.prompt], np.int64))
        inputs = genai.TokenizedInputs(ids, ov.Tensor(np.ones((1, len(request.prompt)), np.int64)))
        began = perf_counter()
        out = self.pipeline.generate(inputs, options)
        seconds = perf_counter() - began
        ttft = out.perf_metrics.get_ttft().mean / 1e3
        return PeerResult(
            [int(token) for token in out.tokens[0]], seconds, ttft if ttft > 0 else None
        )

    def _options(self, request: PeerRequest) -> Any:
        options = genai.GenerationConfig()
        options.max_new_tokens = request.max_tokens
        stop_ids = set() if request.ignore_eos else set(request.stop_token_ids)
        options.ignore_eos = not stop_ids
        # OpenVINO GenAI requires an EOS token id even if ignore_eos is true.
        options.set_eos_token_id(min(stop_ids, default=0))
        options.stop_token_ids = stop_ids or {0}
        options.do_sample = request.temperature > 0
        if options.do_sample:
            options.temperature = request.temperature
            options.top_p = 1.0
            options.top_k = 2**31 - 1
            options.rng_seed = request.seed
        if self.lookup:
            options.num_assistant_tokens = _LOOKUP_TOKENS
            options.max_ngram_size = _LOOKUP_NGRAM
        return options


def _properties(config: WorkerConfig) -> dict[str, Any]:
    """Return OpenVINO's properties: data types and number of threads.

    A CPU without support for the requested type computes in float32.
    """
    dtype, capability = _DTYPES[config.dtype]
    capabilities = ov.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")
    computed = dtype if capability in capabilities else "f32"
    return {
        "INFERENCE_PRECISION_HINT": computed,
        # With computation in float32, OpenVINO cannot store the KV cache in bfloat16; float16 has
        # the same size.
        "KV_CACHE_PRECISION": dtype if computed == dtype else "f16",
        "INFERENCE_NUM_THREADS": config.threads,
    }
