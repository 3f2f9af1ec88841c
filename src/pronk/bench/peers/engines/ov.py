"""OpenVINO GenAI: plain, with prompt lookup, and with a draft model."""

from __future__ import annotations

import json
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import openvino as ov
import openvino_genai as genai

from .checkpoint import ArrayCheckpoint, cached
from .contract import Generated, Loaded, PeerRequest, Unsupported, WorkerConfig

__all__ = ["OpenVino"]

# What the library's own samples use.
_LOOKUP_TOKENS, _LOOKUP_NGRAM, _DRAFT_TOKENS = 5, 3, 5

# Beside a converted model: what its weights are.
_NOTE = "weights.txt"

# How the library calls a type, and the capability of a CPU that computes in it.
_TYPES = {"bfloat16": ("bf16", "BF16"), "float16": ("f16", "FP16"), "float32": ("f32", "FP32")}


class OpenVino:
    """``LLMPipeline.generate`` on token ids."""

    def prepare(self, config: WorkerConfig) -> None:
        """Write the OpenVINO model of the checkpoint, and of the draft model if there is one."""
        _convert(config, config.checkpoint)
        if config.draft is not None:
            _convert(config, config.draft)

    def load(self, config: WorkerConfig) -> Loaded:
        """Compile the pipeline, with nothing quantized but the weights: by default it would keep an 8-bit cache."""
        self.variant = config.variant
        if config.variant == "draft" and config.draft is None:
            msg = "expected a draft model"
            raise Unsupported(msg)
        properties = _properties(config)
        scheduler = genai.SchedulerConfig()
        scheduler.enable_prefix_caching = False
        # As the pipeline has it without a scheduler of ours: a prompt is read in one piece.
        scheduler.max_num_batched_tokens = 2**31 - 1
        extra: dict[str, Any] = {}
        if config.variant == "prompt_lookup":
            extra["prompt_lookup"] = True
        if config.draft is not None:
            extra["draft_model"] = genai.draft_model(_convert(config, config.draft), "CPU", **properties)
        folder = _convert(config, config.checkpoint)
        self.pipeline = genai.LLMPipeline(folder, "CPU", scheduler_config=scheduler, **extra, **properties)
        versions = {"openvino": ov.__version__, "openvino-genai": genai.__version__}
        settings = {key.lower(): str(value) for key, value in properties.items()}
        settings |= {"weights": (folder / _NOTE).read_text(encoding="utf-8"), "backend": "paged attention"}
        if config.variant == "prompt_lookup":
            settings["lookup"] = f"{_LOOKUP_TOKENS} tokens, n-grams up to {_LOOKUP_NGRAM}"
        if config.variant == "draft":
            settings["draft"] = f"{_DRAFT_TOKENS} tokens"
        return Loaded(versions, settings)

    def generate(self, request: PeerRequest) -> Generated:
        """Continue one prompt; without chat mode and prefix caching nothing is kept between calls."""
        options = self._options(request)
        ids = ov.Tensor(np.array([request.prompt], np.int64))
        inputs = genai.TokenizedInputs(ids, ov.Tensor(np.ones((1, len(request.prompt)), np.int64)))
        began = perf_counter()
        out = self.pipeline.generate(inputs, options)
        seconds = perf_counter() - began
        ttft = out.perf_metrics.get_ttft().mean / 1e3
        return Generated([int(token) for token in out.tokens[0]], seconds, ttft if ttft > 0 else None)

    def _options(self, request: PeerRequest) -> Any:
        options = genai.GenerationConfig()
        options.max_new_tokens = request.max_tokens
        ends = set() if request.ignore_eos else set(request.ends)
        options.ignore_eos = not ends
        # It wants an id even to ignore it.
        options.set_eos_token_id(min(ends, default=0))
        options.stop_token_ids = ends or {0}
        options.do_sample = request.temperature > 0
        if options.do_sample:
            options.temperature, options.top_p, options.top_k = request.temperature, 1.0, 2**31 - 1
            options.rng_seed = request.seed
        if self.variant == "prompt_lookup":
            options.num_assistant_tokens, options.max_ngram_size = _LOOKUP_TOKENS, _LOOKUP_NGRAM
        if self.variant == "draft":
            options.num_assistant_tokens = _DRAFT_TOKENS
        return options


def _properties(config: WorkerConfig) -> dict[str, Any]:
    """OpenVINO's settings: arithmetic in the config's dtype, or in float32 where the CPU lacks it.

    With quantized weights, inputs are rounded to 8 bits where the library would do so by itself.
    """
    kept, capability = _TYPES[config.dtype]
    computed = kept if capability in ov.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES") else "f32"
    properties = {
        "INFERENCE_PRECISION_HINT": computed,
        # With float32 arithmetic it takes no bfloat16 cache.
        "KV_CACHE_PRECISION": kept if computed == kept else "f16",
        "INFERENCE_NUM_THREADS": config.threads,
    }
    name = "DYNAMIC_QUANTIZATION_GROUP_SIZE"
    return properties | {name: 0 if config.weights is None else ov.Core().get_property("CPU", name)}


def _convert(config: WorkerConfig, source: Path) -> Path:
    def write(folder: Path) -> None:
        from .ov_graph import write_openvino  # noqa: PLC0415 - needed once per checkpoint

        kept = write_openvino(ArrayCheckpoint(source), folder, config.dtype, config.weights)
        (folder / _NOTE).write_text(kept, encoding="utf-8")
        raw = json.loads((source / "config.json").read_text(encoding="utf-8"))
        (folder / "config.json").write_text(json.dumps({"model_type": raw["model_type"]}), encoding="utf-8")
        if config.draft is not None:
            _convert_tokenizer(source, folder)

    kind = "openvino-draft" if config.draft is not None else "openvino"
    weights = config.dtype if config.weights is None else f"{config.weights}-{config.dtype}"
    return cached(config.cache, source, f"{kind}-{weights}", write)


def _convert_tokenizer(source: Path, folder: Path) -> None:
    """The pipeline asks the tokenizers of model and draft whether they agree, though we give it ids."""
    from openvino_tokenizers import convert_tokenizer  # noqa: PLC0415 - only draft models need these two
    from transformers import AutoTokenizer  # noqa: PLC0415

    tokenizer = AutoTokenizer.from_pretrained(source, local_files_only=True)
    encoder, decoder = convert_tokenizer(tokenizer, with_detokenizer=True)
    ov.save_model(encoder, folder / "openvino_tokenizer.xml")
    ov.save_model(decoder, folder / "openvino_detokenizer.xml")
