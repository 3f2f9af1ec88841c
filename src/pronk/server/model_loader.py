"""Loading and unloading of one model of a server, and an estimate of the memory it needs."""

from __future__ import annotations

import ctypes
import gc
import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pronk import LLM, AsyncLLM, OptionError
from pronk.backends import default_kv_bytes, parse_memory
from pronk.base import FairExecutor, size_texts
from pronk.base.arrays import KV_DTYPES
from pronk.checkpoint import is_gguf, open_checkpoint, parse_dtype, read_config
from pronk.server.metrics import Metrics
from pronk.server.moderation import MODERATION_TEMPLATE, ModerationPrompt
from pronk.server.service import Service
from pronk.server.settings import ServerSettings

_log = logging.getLogger(__name__)

# Bytes of the tokenizer and its tables per token of the vocabulary. SmolLM2 (49,152 tokens) and
# Qwen2.5 (151,936) need 450 to 550.
_VOCABULARY_BYTES = 512
# Maximum size of one model's KV cache, as a fraction of the memory for all models; only if the
# size of the KV cache was not set.
_MAX_KV_FRACTION = 0.25


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes of memory that a loaded model needs, without draft models and adapters."""

    weights: int  # bytes of the weights and the tokenizer
    kv: int  # bytes of the KV cache when it is full

    @property
    def total(self) -> int:
        """Bytes of weights, tokenizer and full KV cache together."""
        return self.weights + self.kv

    def check_fits(self, name: str, memory: int, taken: int, kind: str) -> None:
        """Raise ``OptionError`` if the model does not fit into the memory beside other models.

        Args:
            name: name of the model.
            memory: bytes for all models.
            taken: bytes of the other models.
            kind: the kind of the other models, for the message: ``loaded`` or ``pinned``.
        """
        if self.total <= memory - taken:
            return
        sizes = (memory - taken, memory, taken, self.total, self.weights, self.kv)
        left, limit, others, total, weights, kv = size_texts(*sizes, binary=True)
        less = f" ({limit} less {others} of {kind} models)" if taken else ""
        msg = (
            f"memory: expected at most {left}{less}, found {total} of {name}: weights {weights}, "
            f"KV cache {kv}; set --kv-memory lower or --memory higher"
        )
        raise OptionError(msg)


@dataclass(frozen=True)
class ModelLoader:
    """Loads one model, any number of times.

    The methods block, so that they must not run in the event loop.
    """

    path: Path
    options: Mapping[str, Any]  # arguments of :class:`pronk.LLM` without ``model``
    settings: ServerSettings  # settings of the server; ``name`` is the name of this model
    moderation_template: str = MODERATION_TEMPLATE
    memory: int | None = None  # bytes for all models of the server; ``None`` sets no limit

    def estimate(self) -> MemoryEstimate:
        """Read the headers of the model's files, and estimate the memory that the model needs.

        Raises:
            CheckpointError: the files cannot be read.
            OptionError: an option does not fit the model.
        """
        config = read_config(self.path, context=self.options["context"])
        dtype = parse_dtype(self.options["dtype"], config)
        checkpoint = open_checkpoint(self.path)
        weights = sum(map(checkpoint.nbytes, checkpoint))
        # The loader converts unquantized weights of safetensors files to ``dtype``.
        if not is_gguf(self.path) and config.quantization is None:
            weights = weights * dtype.itemsize // parse_dtype("auto", config).itemsize
        kv_dtype = KV_DTYPES[self.options["kv_dtype"]] or dtype
        if self.options["kv_memory"] is not None:
            kv = parse_memory(self.options["kv_memory"])
        else:
            limit = None if self.memory is None else int(self.memory * _MAX_KV_FRACTION)
            max_batch = self.options["max_batch"]
            share_prefixes = (
                self.options["prefix_cache"] or self.options["prompt_cache"] is not None
            )
            kv = default_kv_bytes(
                config, dtype, kv_dtype, max_batch, limit, share_prefixes=share_prefixes
            )
        return MemoryEstimate(weights + _VOCABULARY_BYTES * config.vocab_size, kv)

    def load(
        self,
        metrics: Metrics | None = None,
        progress: Callable[[int, int], None] | None = None,
        *,
        executor: FairExecutor | None = None,
    ) -> Service:
        """Load the model and start its engine.

        Args:
            metrics: metrics of this model from before an unload, whose counters go on; ``None``
                makes new metrics.
            progress: called with the number of bytes loaded so far, and the total.
            executor: threads of the :class:`~pronk.async_llm.AsyncLLM`; ``None`` makes new ones.

        Raises:
            CheckpointError: the model cannot be loaded.
            OptionError: an option does not fit the model.
        """
        options = dict(self.options)
        if self.memory is not None:
            options["kv_memory"] = self.estimate().kv
        llm = LLM(self.path, **options, progress=progress)
        try:
            engine = AsyncLLM(
                llm,
                max_requests=self.settings.limits.requests,
                shared=self.settings.is_shared,
                executor=executor,
            )
            prompt = ModerationPrompt(llm.tokenizer, self.moderation_template)
            return Service(engine, self.settings, moderation_prompt=prompt, metrics=metrics)
        except Exception:
            llm.close()
            raise

    @staticmethod
    def finish(service: Service) -> None:
        """Save the drafters' acceptance statistics and close the model of a service.

        Call it after the service's engine thread has ended.
        """
        llm = service.engine.llm
        assert isinstance(llm, LLM), "expected the LLM of load(), found another model"
        try:
            llm.calibration.save()
        except (OptionError, OSError) as error:
            # The disk may be full. The model is closed all the same, because the next model needs
            # its memory.
            _log.warning("%s", error)
        finally:
            llm.close()

    @staticmethod
    def return_memory() -> None:
        """Give the memory of unreachable objects back to the system."""
        gc.collect()
        with suppress(OSError, AttributeError):  # only the C library of GNU has malloc_trim
            ctypes.CDLL(None).malloc_trim(0)
