"""Runs forward passes of a model over the draft trees of a batch of requests.

The layers and the LM head are one program (:mod:`pronk.models.layer_executor`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from time import perf_counter
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from pronk.base.arrays import Array, DType
from pronk.cache.paged import PagedCache, SavedFeature
from pronk.checkpoint.config import ModelConfig
from pronk.models.cost_model import CostModel
from pronk.models.decoder import Decoder, fixed_costs
from pronk.models.forward_batch import ForwardBatch
from pronk.models.layer_executor import ChainJob, LayerExecutor
from pronk.models.linear import LinearFactory
from pronk.models.loader import load_decoder
from pronk.models.program import Program
from pronk.sampling.draft_token import DraftIds
from pronk.sampling.sampler import Sampler
from pronk.sampling.stateless import Logits
from pronk.sampling.verify import VerifiedPath

# The first forward pass of a draft chain has one row per uncached token, and each later pass has
# one row. If the first has at most 4 rows, the mean duration of these passes is recorded as the
# cost of a pass of one row.
_MAX_CHAIN_ROWS = 4


class ForwardResult(NamedTuple):
    """Result of a forward pass; lists have one element per entry of the batch.

    Attributes:
        logits: of each entry, float32 ``[len(logits_nodes), vocab]``; the last row is
            ``logits[-1]``, and ``logits[:]`` is an array.
        hidden: layer number (from 1) to the output ``[rows, hidden]`` of each entry, in the model's
            compute dtype; only of the layers in ``collect``.
        seconds: duration of the forward pass, with the choices of tokens that belong to it.
        sampled: for each entry, the tokens that a worker process sampled, by the index of their row
            of logits. ``None`` without workers that sample.
        experts_read: experts that the pass read, relative to a pass of one row; ``None``: no
            experts, or not counted (several workers).
        paths: for each entry, the result of verifying its tree; ``None`` in place of a result if
            the pass has not verified the tree, and in place of all if it verifies none.
    """

    logits: Sequence[Logits]
    hidden: Mapping[int, Sequence[Array]]
    seconds: float
    sampled: Sequence[Mapping[int, int]] | None = None
    experts_read: float | None = None
    paths: Sequence[VerifiedPath | None] | None = None


class HeadRunner(Protocol):
    """Runner of a drafter's trained head on the device of a :class:`ModelRunner`.

    Attributes:
        max_chains: maximum number of jobs of :meth:`draft_chains`.
    """

    max_chains: int

    @property
    def nbytes(self) -> int:
        """Bytes of the weight matrices that a pass reads."""

    def supports_draft_chain(self, sampler: Sampler) -> bool:
        """Return whether :meth:`draft_chains` is available for a request with this sampler."""

    def run(self, batch: ForwardBatch, features: Array) -> tuple[Array, Array]:
        """Run rows of the head.

        Args:
            batch: the rows, whose KV slots are allocated.
            features: feature of each row, ``[rows, hidden]``.

        Returns:
            The outputs ``[rows, hidden]``, and the logits of ``batch.logits_rows``, float32.
        """

    def draft_chains(
        self, jobs: Sequence[ChainJob], feature: SavedFeature, slots: Sequence[NDArray[np.int64]]
    ) -> list[int]:
        """Draft chains of several requests, as :meth:`ModelRunner.draft_chains`.

        Args:
            jobs: the chains.
            feature: feature that the rows of the entries read.
            slots: for each job, the slots of its rows' features in the target's cache.
        """


class ModelRunner:
    """Runs forward passes of one model and measures their durations.

    Attributes:
        exact: whether the bits of a row's logits depend on its own text alone, in every batch.
    """

    exact = True
    # Maximum number of jobs of :meth:`draft_chains`. The processor shares passes among several
    # requests by :meth:`forward`.
    max_chains = 1

    def __init__(
        self,
        decoder: Decoder,
        cache: PagedCache,
        other_caches: Sequence[PagedCache] = (),
        *,
        executor: LayerExecutor | None = None,
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        """Create a runner of a model in this process, or on several processes by ``executor``.

        ``other_caches`` are KV caches of other models that the layers read, such as the target's
        for a draft model; each entry of a batch has ``other_tables`` for them. ``clock`` returns
        the time in seconds.
        """
        self.decoder = decoder
        self.cache = cache
        self.clock = clock
        self.cost_model = CostModel(*fixed_costs(decoder, cache.state_bytes))
        self.dtype = cache.dtype
        self._num_layers = len(decoder.layers)
        self._executor = executor or LayerExecutor(decoder, cache, other_caches)
        # Whether :meth:`draft_chains` is available at all: not if several processes share each
        # forward pass, nor if rotations depend on the length of the prompt.
        self._drafts_chains = executor is None and not self._executor.has_dynamic_rope
        # program of the final norm, built at the first call of :meth:`final_norm`
        self._final_norm: Program | None = None

    def forward(self, batch: ForwardBatch, collect: frozenset[int] = frozenset()) -> ForwardResult:
        """Run one forward pass over a batch.

        Keys, values and features are stored after each request's committed tokens.

        Args:
            batch: at least one row; :meth:`PagedCache.prepare` has allocated the slots of all rows.
            collect: numbers (from 1) of the layers whose output is returned.
        """
        start_time = self.clock()
        result = self._executor.run(batch, self._num_layers, sorted(collect) if collect else ())
        assert result.logits is not None
        seconds = self.clock() - start_time
        hidden: dict[int, list[Array]] = {}
        for layer, rows in result.hidden.items():
            hidden[layer] = batch.split_rows(rows)
        experts_read = None
        if self.decoder.config.mixture is not None:
            experts_read = self._relative_to_one_row(result.experts_read)
        logits = batch.split_logits(result.logits)
        return ForwardResult(logits, hidden, seconds, experts_read=experts_read, paths=result.paths)

    def _relative_to_one_row(self, experts_read: int | None) -> float | None:
        """Return experts read as a multiple of those of one row; ``None`` without experts."""
        mixture = self.decoder.config.mixture
        if mixture is None or experts_read is None:
            return None
        return experts_read / (mixture.per_row * sum(mixture.layers))

    def run_first_layers(self, batch: ForwardBatch, num_layers: int) -> list[Array]:
        """Run rows through the first layers only.

        Return their output, ``[rows, hidden]`` per entry. The rows see the committed tokens and
        earlier nodes of their tree, as in :meth:`forward`. Their keys and values of these layers
        are stored in their slots after the committed tokens, and so are outputs that the cache
        saves (:meth:`PagedCache.save_feature`). A later call can read them
        (``BatchEntry.num_computed``); :meth:`forward` computes and stores all of them again.

        Args:
            batch: at least one row, as in :meth:`forward`; no logits are computed.
            num_layers: number of layers, at least 1.
        """
        result = self._executor.run(batch, num_layers, [num_layers])
        return batch.split_rows(result.hidden[num_layers])

    def final_norm(self, rows: Array) -> Array:
        """Apply the final norm to outputs of the last layer, ``[rows, hidden]``, in their dtype."""
        if self._final_norm is None:
            decoder = self.decoder
            self._final_norm = Program(decoder.kernels, decoder.config.hidden_size, self.dtype)
            self._final_norm.norm(self.decoder.norm)
        states = np.array(rows, order="C")  # a copy, which the program overwrites
        self._final_norm.run(None, states)
        return states

    @property
    def is_usable(self) -> bool:
        """Whether forward passes are possible: False after a worker process has been lost."""
        return self._executor.is_usable

    @property
    def communication_seconds(self) -> float:
        """Seconds spent so far on communication with worker processes; 0 without any."""
        return self._executor.communication_seconds

    def supports_draft_chain(self, sampler: Sampler) -> bool:
        """Return whether :meth:`draft_chains` is available for a request with this sampler."""
        return self._drafts_chains and sampler.library_sampler is not None

    def draft_chains(self, jobs: Sequence[ChainJob]) -> list[int]:
        """Draft chains of several requests, with all forward passes in one call.

        :meth:`PagedCache.prepare` has allocated slots for all rows.

        Args:
            jobs: the chains, at most :attr:`max_chains`.

        Returns:
            For each job, the number of forward passes. The last one gives no draft token if it
            allows none or has non-finite logits.
        """
        start_time = self.clock()
        num_passes = self._executor.draft_chains(jobs)
        seconds = self.clock() - start_time
        count = len(jobs)
        rows = sum([job.entry.num_rows for job in jobs])
        length = sum([job.entry.block_table.length for job in jobs])
        most = max(num_passes)
        one_pass = self.cost_model.costs(length, count)
        if rows <= _MAX_CHAIN_ROWS * count:
            self.cost_model.learn(count, length, seconds / most, requests=count, plain=True)
        elif one_pass is not None:
            later = (most - 1) * one_pass.at(count)
            self.cost_model.learn_prompt(rows, max(0.0, seconds - later))
        return num_passes

    def draft_pool(self, config: ModelConfig) -> Callable[..., PagedCache]:
        """Return the class of a draft model's KV cache, or a function with its arguments.

        Raises:
            OptionError: the device of this runner does not compute draft models of this kind.
        """
        del config  # the processor computes all models
        return PagedCache

    def load_draft_model(
        self, folder: Path, cache: PagedCache, dtype: DType, weights: str
    ) -> ModelRunner:
        """Load a draft model for the device of this runner, and return its own runner.

        Args:
            folder: folder or GGUF file of the draft model.
            cache: its KV cache, made by the result of :meth:`draft_pool`.
            dtype: dtype of its weights.
            weights: how its weights are stored, as for :class:`~pronk.llm.LLM`.
        """
        kernels = self.decoder.kernels
        decoder = load_decoder(folder, cache.config, dtype=dtype, kernels=kernels, weights=weights)
        return ModelRunner(decoder, cache, clock=self.clock)

    @property
    def module_decoder(self) -> Decoder:
        """The model, whose embedding and LM head drafters' modules on its device may share."""
        return self.decoder

    def module_weights(self, weights: str) -> str | LinearFactory:
        """Return how modules on the model's device store their weights.

        ``weights`` is ``plain``, ``int8`` or ``int4``; the result is an argument of
        :func:`~pronk.models.loader.load_decoder`.
        """
        return weights

    def open_head(
        self,
        head: Decoder,
        compile_pass: Callable[..., None],
        cache: PagedCache,
        ids: DraftIds | None,
    ) -> HeadRunner | None:
        """Return the runner of a trained head; ``None``: the head is a program of the processor.

        Args:
            head: the head, loaded with :meth:`module_weights`.
            compile_pass: ``compile_pass(program, logits=…)`` appends the operations of a pass.
            cache: the head's KV cache, made by the result of :meth:`draft_pool`.
            ids: the target's token of each logit; ``None``: 0, 1, ….
        """
        del head, compile_pass, cache, ids
        return None

    def record_duration(
        self,
        batch: ForwardBatch,
        seconds: float,
        *,
        plain: bool | None = None,
        experts_read: float | None = None,
    ) -> None:
        """Record the duration of a forward pass, or of a step without its time in drafters.

        A pass that mostly reads prompts is recorded as such. ``plain``: whether the pass has no
        draft tokens. ``experts_read``: number of experts that it read, relative to a pass of one
        row (:meth:`CostModel.learn`).
        """
        entries = batch.entries
        num_unread = 0
        for entry in entries:
            num_unread += entry.logits_nodes.start
        if num_unread > _MAX_CHAIN_ROWS * len(entries):
            self.cost_model.learn_prompt(batch.num_rows, seconds)
        # a pass for embeddings runs without the LM head, so it takes less time and is left out
        elif all(batch.logits_counts):
            self.cost_model.learn(
                batch.num_rows,
                batch.num_committed,
                seconds,
                requests=len(entries),
                plain=plain,
                experts_read=experts_read,
            )
