"""llama.cpp through llama-cpp-python on a GGUF file: plain decoding and prompt lookup."""

from __future__ import annotations

from time import perf_counter

import llama_cpp
from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

from .contract import PeerRequest, PeerResult, WorkerConfig

_INITIAL_CONTEXT = 1024  # tokens; a longer request opens the model again, with a larger context
_LOOKUP_NGRAM = 2  # maximum n-gram length; default of LlamaPromptLookupDecoding
_LOOKUP_TOKENS = 10  # number of draft tokens per step; default of LlamaPromptLookupDecoding


class LlamaCpp:
    """The engine llama.cpp, called by ``Llama.generate`` with token ids."""

    def load(self, config: WorkerConfig) -> dict[str, str]:
        """Load the GGUF file, with a small context that grows on demand."""
        self.config = config
        # The KV cache is float32 for float32, else float16: llama.cpp's default, as large as
        # bfloat16 of other engines.
        is_float32 = config.dtype == "float32"
        self.kv_type = llama_cpp.GGML_TYPE_F32 if is_float32 else llama_cpp.GGML_TYPE_F16
        self._open(_INITIAL_CONTEXT)
        notes = {
            "llama-cpp-python": llama_cpp.__version__,
            "kv_cache": "float32" if is_float32 else "float16",
            "flash_attention": "off",
            "cpu": " ".join(llama_cpp.llama_print_system_info().decode().split()),
        }
        if config.variant == "prompt_lookup":
            notes["lookup"] = f"{_LOOKUP_TOKENS} tokens, n-grams up to {_LOOKUP_NGRAM}"
        return notes

    def generate(self, request: PeerRequest) -> PeerResult:
        """Continue one prompt from an empty KV cache."""
        # The draft tokens of the last step take KV slots, too.
        needed = len(request.prompt) + request.max_tokens + _LOOKUP_TOKENS + 1
        if needed > self.llama.n_ctx():
            self._open(1 << (needed - 1).bit_length())
        # Without the reset, llama-cpp-python reuses the KV cache of the prefix that this prompt
        # shares with the previous prompt.
        self.llama.reset()
        self.llama._ctx.kv_cache_clear()  # noqa: SLF001 - there is no public method
        self.llama.set_seed(request.seed)
        stops = frozenset(() if request.ignore_eos else request.stop_token_ids)
        tokens: list[int] = []
        ttft = None
        began = perf_counter()
        generated = self.llama.generate(
            request.prompt,
            top_k=0,
            top_p=1.0,
            min_p=0.0,
            temp=request.temperature,
            repeat_penalty=1.0,
        )
        for token in generated:
            ttft = perf_counter() - began if ttft is None else ttft
            tokens.append(int(token))
            if token in stops or len(tokens) == request.max_tokens:
                break
        return PeerResult(tokens, perf_counter() - began, ttft)

    def _open(self, context: int) -> None:
        lookup = self.config.variant == "prompt_lookup"
        draft_model = None
        if lookup:
            draft_model = LlamaPromptLookupDecoding(_LOOKUP_NGRAM, _LOOKUP_TOKENS)
        self.llama = llama_cpp.Llama(
            self.config.model,
            n_ctx=context,
            n_threads=self.config.threads,
            n_threads_batch=self.config.threads,
            type_k=self.kv_type,
            type_v=self.kv_type,
            # The default of llama-cpp-python. On CPUs, flash attention makes prefill faster but
            # decoding mostly slower.
            flash_attn=False,
            # Verification of draft tokens needs the logits of every position.
            logits_all=lookup,
            draft_model=draft_model,
            verbose=False,
        )
