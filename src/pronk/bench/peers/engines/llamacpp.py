"""llama.cpp through llama-cpp-python: plain, and with its prompt lookup."""

from __future__ import annotations

import importlib.metadata
from collections import Counter
from pathlib import Path
from time import perf_counter

import gguf
import llama_cpp
from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

from .checkpoint import ArrayCheckpoint, cached
from .contract import Generated, Loaded, PeerRequest, Unsupported, WorkerConfig

__all__ = ["LlamaCpp"]

_FIRST_CONTEXT = 1024
_FILE = "model.gguf"
# The defaults of the class.
_LOOKUP_NGRAM, _LOOKUP_TOKENS = 2, 10


class LlamaCpp:
    """``Llama.generate`` on a GGUF file: the checkpoint's weights, those that llama.cpp makes of them, or a user's."""

    def prepare(self, config: WorkerConfig) -> None:
        """Write the GGUF file."""
        _convert(config)

    def load(self, config: WorkerConfig) -> Loaded:
        """Load the file. The context is made anew when a longer text comes."""
        self.config = config
        self.file = _convert(config)
        # An f16 cache is llama.cpp's default, and as large as the bfloat16 one of the others.
        wide = config.dtype == "float32"
        self.kv_type = llama_cpp.GGML_TYPE_F32 if wide else llama_cpp.GGML_TYPE_F16
        self._open(_FIRST_CONTEXT)
        versions = {"llama-cpp-python": llama_cpp.__version__, "gguf": importlib.metadata.version("gguf")}
        settings = {
            "weights": _describe(self.file),
            "kv_cache": "float32" if wide else "float16",
            "flash_attention": "off",
            "cpu": " ".join(llama_cpp.llama_print_system_info().decode().split()),
        }
        if config.variant == "prompt_lookup":
            settings["lookup"] = f"{_LOOKUP_TOKENS} tokens, n-grams up to {_LOOKUP_NGRAM}"
        return Loaded(versions, settings)

    def generate(self, request: PeerRequest) -> Generated:
        """Continue one prompt from an empty cache."""
        needed = len(request.prompt) + request.max_tokens + _LOOKUP_TOKENS + 1
        if needed > self.llama.n_ctx():
            self._open(1 << (needed - 1).bit_length())
        # Otherwise what two prompts have in common would be read once only.
        self.llama.reset()
        self.llama._ctx.kv_cache_clear()  # noqa: SLF001 - it has no public name
        self.llama.set_seed(request.seed)
        ends = frozenset(() if request.ignore_eos else request.ends)
        tokens: list[int] = []
        ttft = None
        began = perf_counter()
        for token in self.llama.generate(
            request.prompt, top_k=0, top_p=1.0, min_p=0.0, temp=request.temperature, repeat_penalty=1.0
        ):
            ttft = perf_counter() - began if ttft is None else ttft
            tokens.append(int(token))
            if token in ends or len(tokens) == request.max_tokens:
                break
        return Generated(tokens, perf_counter() - began, ttft)

    def _open(self, context: int) -> None:
        lookup = self.config.variant == "prompt_lookup"
        self.llama = llama_cpp.Llama(
            str(self.file),
            n_ctx=context,
            n_threads=self.config.threads,
            n_threads_batch=self.config.threads,
            type_k=self.kv_type,
            type_v=self.kv_type,
            # The class's default: on CPUs it reads a prompt slower, but decodes faster, which is most of the time.
            flash_attn=False,
            # With a draft model it keeps the logits of every position, but makes room for them only if told to.
            logits_all=lookup,
            draft_model=LlamaPromptLookupDecoding(_LOOKUP_NGRAM, _LOOKUP_TOKENS) if lookup else None,
            verbose=False,
        )


def _convert(config: WorkerConfig) -> Path:
    if config.checkpoint.is_file():
        return config.checkpoint

    def write(folder: Path) -> None:
        from .gguf_file import write_gguf  # noqa: PLC0415 - needed once per checkpoint

        plain, made = folder / "plain.gguf", folder / _FILE
        write_gguf(ArrayCheckpoint(config.checkpoint), plain, config.dtype)
        if config.weights is None:
            plain.rename(made)
        else:
            _quantize(plain, made, config.weights, config.threads)
            plain.unlink()

    kind = config.dtype if config.weights is None else f"{config.weights}-{config.dtype}"
    return cached(config.cache, config.checkpoint, f"gguf-{kind}", write) / _FILE


def _quantize(source: Path, target: Path, weights: str, threads: int) -> None:
    """What ``llama-quantize`` does, by the same function, without an importance matrix."""
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{weights.upper()}")
    params.nthread = threads
    code = llama_cpp.llama_model_quantize(str(source).encode(), str(target).encode(), params)
    if code != 0:
        msg = f"llama.cpp cannot quantize this checkpoint to {weights}: error {code}"
        raise Unsupported(msg)


def _describe(file: Path) -> str:
    """The types of the matrices in a file, what weighs most first: where a type does not fit, llama.cpp has others."""
    sizes = Counter[str]()
    for tensor in gguf.GGUFReader(file).tensors:
        if len(tensor.shape) > 1:
            sizes[tensor.tensor_type.name] += int(tensor.n_bytes)
    return ", ".join(f"{name} {size / sizes.total():.0%}" for name, size in sizes.most_common())
