"""Token trees verified at the end of a pass: the same tokens as by a call for each tree."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from pronk.base.arrays import FLOAT32
from pronk.cache.blocks import BlockTable
from pronk.engine.request_step import verify_in_library
from pronk.models.forward_batch import BatchEntry, ForwardBatch
from pronk.models.model_runner import ForwardResult, ModelRunner
from pronk.sampling.logits_processors import TokenContext
from pronk.sampling.params import SamplingParams
from pronk.sampling.sampler import NotFiniteError, Sampler
from pronk.sampling.tree import TokenTree
from pronk.sampling.verify import VerifiedPath
from tiny_models import VOCAB, decoder_of, kernels, make_cache, tiny_decoder, tiny_module

OPTIONS: dict[str, tuple[Any, ...]] = {
    "temperature": (0.0, 0.3, 1.0),
    "top_k": (0, 7),
    "top_p": (1.0, 0.8),
    "min_p": (0.0, 0.1),
    "repetition_penalty": (1.0, 1.3),
    "presence_penalty": (0.0, 0.5),
    "frequency_penalty": (0.0, 0.7),
}


class Text:
    """A request in the cache, and its sampler."""

    def __init__(self, runner: ModelRunner, dice: random.Random, seed: int) -> None:
        self.table = BlockTable()
        self.tokens = [dice.randrange(VOCAB) for _ in range(dice.randrange(2, 30))]
        params = SamplingParams(**{name: dice.choice(each) for name, each in OPTIONS.items()})
        context = TokenContext(self.tokens, num_prompt=len(self.tokens) // 2)
        self.sampler = Sampler(params, seed, context, VOCAB, kernels=runner.decoder.kernels)

    def read(self, runner: ModelRunner) -> None:
        """Read all tokens but the last one."""
        tokens = self.tokens[:-1]
        runner.cache.prepare(self.table, len(tokens))
        entry = BatchEntry(self.table, TokenTree.chain(tokens))
        assert runner.forward(ForwardBatch([entry])).paths is None
        runner.cache.commit_slots(self.table, range(len(tokens)))

    def likely_tree(self, runner: ModelRunner, dice: random.Random) -> TokenTree:
        """Return a tree below the last token whose nodes often have the target's tokens."""
        tokens = [self.tokens[-1]]
        parents = [-1]
        verify = [True]
        right = 0
        for _ in range(dice.randrange(6)):
            tree = TokenTree(tuple(tokens), tuple(parents))
            token = self.chosen(runner, tree, right)
            parent = right
            if dice.random() < 0.3:
                token = dice.randrange(VOCAB)
                parent = dice.randrange(len(tokens))
            if token in tree.children(parent):
                continue
            tokens.append(token)
            parents.append(parent)
            verify.append(dice.random() < 0.9)
            if parent == right and verify[-1]:
                right = len(tokens) - 1
        has_unacceptable = not all(verify)
        return TokenTree(tuple(tokens), tuple(parents), tuple(verify) if has_unacceptable else None)

    def chosen(self, runner: ModelRunner, tree: TokenTree, node: int) -> int:
        """Return the target's token after a node of a tree."""
        runner.cache.prepare(self.table, self.table.length + len(tree))
        entry = BatchEntry(self.table, tree, range(len(tree)))
        logits = runner.forward(ForwardBatch([entry])).logits[0]
        path = [tree.tokens[each] for each in tree.path(node)]
        with self.sampler.after(path):
            return self.sampler.choose(logits[node])

    def counts(self) -> list[NDArray[np.int32]]:
        """Return the counts of tokens of the penalties, if there are any."""
        return [each.counts.copy() for each in self.sampler.processors]  # type: ignore[attr-defined]

    def entry(self, runner: ModelRunner, tree: TokenTree, *, in_pass: bool) -> BatchEntry:
        runner.cache.prepare(self.table, self.table.length + len(tree))
        library_sampler = self.sampler.library_sampler if in_pass else None
        return BatchEntry(self.table, tree, range(len(tree)), library_sampler=library_sampler)


@pytest.fixture(scope="module")
def runner() -> ModelRunner:
    decoder = tiny_decoder(FLOAT32)
    return ModelRunner(decoder, make_cache(decoder.config, FLOAT32))


@pytest.mark.parametrize("threads", [1, 2])
def test_trees_of_a_batch(
    runner: ModelRunner, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pronk.models.operations.num_threads", lambda: threads)
    dice = random.Random(1)
    num_accepted = 0
    num_rejected = 0
    for round_number in range(25):
        texts = [Text(runner, dice, seed) for seed in range(dice.randrange(1, 5))]
        for text in texts:
            text.read(runner)
        trees = [text.likely_tree(runner, dice) for text in texts]
        in_pass = [dice.random() < 0.8 for _ in texts]
        entries = [
            text.entry(runner, tree, in_pass=each)
            for text, tree, each in zip(texts, trees, in_pass, strict=True)
        ]
        counts = [text.counts() for text in texts]
        result = runner.forward(ForwardBatch(entries))
        assert (result.paths is None) == (not any(in_pass))
        for number, (text, tree) in enumerate(zip(texts, trees, strict=True)):
            want = verify_in_library(text.sampler, tree, result.logits[number])
            text.sampler.recover()
            if result.paths is not None:
                assert result.paths[number] == (want if in_pass[number] else None), round_number
            for before, after in zip(counts[number], text.counts(), strict=True):
                assert (before == after).all()
            assert want is not None
            num_accepted += len(want.path)
            num_rejected += len(tree) - 1 - len(want.path)
            runner.cache.release(text.table)
    assert num_accepted > 50
    assert num_rejected > 20


def last_of_prompt(runner: ModelRunner, text: Text) -> ForwardResult:
    """Read a whole text in one pass, which chooses the token after its last one."""
    runner.cache.prepare(text.table, len(text.tokens))
    last = range(len(text.tokens) - 1, len(text.tokens))
    sampler = text.sampler.library_sampler
    entry = BatchEntry(
        text.table, TokenTree.chain(text.tokens), last, len(text.tokens), library_sampler=sampler
    )
    return runner.forward(ForwardBatch([entry]))


@pytest.mark.parametrize("shape", [{}, {"special": "gemma4", "windows": (20, None, 20, None)}])
def test_the_last_token_of_a_prompt(shape: dict[str, Any]) -> None:
    """A model whose last layers store nothing chooses after the pass (``paths`` is ``None``)."""
    decoder = tiny_decoder(FLOAT32, **shape)
    runner = ModelRunner(decoder, make_cache(decoder.config, FLOAT32))
    dice = random.Random(2)
    for seed in range(8):
        text = Text(runner, dice, seed)
        result = last_of_prompt(runner, text)
        want = verify_in_library(
            text.sampler, TokenTree.chain(text.tokens[-1:]), result.logits[0][-1:]
        )
        assert want is not None
        assert want.path == ()
        assert result.paths == (None if shape else [want])
        runner.cache.release(text.table)


def test_logits_that_are_not_finite() -> None:
    """The pass has no path; the call for the tree then tells the engine why."""
    decoder = decoder_of(tiny_module(), kernels(), "plain")
    decoder.norm.weight[:] = np.nan
    runner = ModelRunner(decoder, make_cache(decoder.config, FLOAT32))
    text = Text(runner, random.Random(3), 0)
    result = last_of_prompt(runner, text)
    assert result.paths == [None]
    with pytest.raises(NotFiniteError):
        verify_in_library(text.sampler, TokenTree.chain(text.tokens[-1:]), result.logits[0][-1:])


def test_memory_that_is_full() -> None:
    """The request has no path, and the other requests of the batch keep theirs."""
    dice = random.Random(4)
    decoder = tiny_decoder(FLOAT32)
    runner = ModelRunner(decoder, make_cache(decoder.config, FLOAT32))
    texts = [Text(runner, dice, seed) for seed in range(2)]
    entries = list[BatchEntry]()
    for text in texts:
        text.read(runner)
        tree = TokenTree.chain(text.tokens[-1:])
        entries.append(text.entry(runner, tree, in_pass=True))
    choices = ForwardBatch(entries).make_choices()
    assert choices is not None
    choices.structs[0].accepted = -2
    choices.structs[1].accepted = 0
    first, second = choices.results()
    assert first is None
    assert second == VerifiedPath((), (0,))
