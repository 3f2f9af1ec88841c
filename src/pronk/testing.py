"""Tools for tests of drafters: a tiny model, a scripted drafter, a comparison with plain decoding.

::

    def test_my_drafter(tmp_path):
        # With budget="auto", measured times decide whether any draft token is verified.
        llm = LLM(tiny_checkpoint(tmp_path), budget="all")
        assert_lossless(llm, MyDrafter(), ["def add(a, b):", "the quick brown fox"])
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from pronk.base.arrays import Array
from pronk.drafting import DraftContext, Drafter, Proposer
from pronk.llm import LLM
from pronk.sampling.params import SamplingParams
from pronk.sampling.tree import TokenTree

_CODE = """\
def add(a, b):
    return a + b


def mean(values):
    return sum(values) / len(values)
"""
_TOKENIZER_TEXTS = (
    _CODE,
    "The quick brown fox jumps over the lazy dog, and then the dog sleeps in the sun.",
    "for i in range(10):\n    print(i, i * i)\n",
    "Grüße aus Köln — naïve café, 東京と大阪, 🙂🙃",
)

_SAMPLING_OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0.8, "seed": 1},
    {
        "temperature": 1.0,
        "seed": 2,
        "top_p": 0.9,
        "repetition_penalty": 1.2,
        "frequency_penalty": 0.2,
    },
)


def byte_tokenizer(vocab_size: int = 300) -> Tokenizer:
    """Return a byte-level BPE tokenizer, trained on a few short texts.

    Id 0 is the end of a text, the ids 1 to 256 are bytes, and later ids are merges.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_TOKENIZER_TEXTS, trainer)
    return tokenizer


def tiny_checkpoint(
    folder: Path, *, seed: int = 0, layers: int = 2, hidden: int = 64, context: int = 512
) -> Path:
    """Write a random Llama model (float32, 300 token ids); return its folder.

    The weights are scaled so that the most likely token has a probability of about 0.5, as in a
    trained model, and that greedy texts do not loop. A comparison of looping texts would miss many
    errors. The files of the same arguments are the same on every machine.

    Args:
        folder: the folder to write.
        seed: seed of the random weights.
        layers: number of layers, at least 1.
        hidden: hidden size, a multiple of 32.
        context: maximum number of tokens.
    """
    vocab = 300
    heads = hidden // 16
    width = 2 * hidden
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads // 2,
        "head_dim": 16,
        "max_position_embeddings": context,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "bos_token_id": 0,
        "eos_token_id": 0,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
    }
    shapes = {"self_attn.q_proj": (hidden, hidden), "self_attn.o_proj": (hidden, hidden)}
    shapes |= {f"self_attn.{name}_proj": (hidden // 2, hidden) for name in "kv"}
    shapes |= {
        "mlp.gate_proj": (width, hidden),
        "mlp.up_proj": (width, hidden),
        "mlp.down_proj": (hidden, width),
    }
    generator = np.random.PCG64(seed)

    def matrix(rows: int, columns: int, scale: float) -> Array:
        return portable_normal(generator, rows * columns, scale).reshape(rows, columns)

    ones = np.ones(hidden, np.float32)
    tensors = {"model.embed_tokens.weight": matrix(vocab, hidden, 0.7), "model.norm.weight": ones}
    tensors["lm_head.weight"] = matrix(vocab, hidden, 2.5 * hidden**-0.5)
    for layer in range(layers):
        prefix = f"model.layers.{layer}"
        for name, (rows, columns) in shapes.items():
            tensors[f"{prefix}.{name}.weight"] = matrix(rows, columns, 1.2 * columns**-0.5)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{prefix}.{norm}.weight"] = ones
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    byte_tokenizer(vocab).save(str(folder / "tokenizer.json"))
    return folder


def portable_normal(generator: np.random.PCG64, count: int, std: float) -> Array:
    """Return random numbers that are nearly normal, and the same on every machine.

    Each is the sum of four uniform integers, times a factor: no function of the C library, whose
    last bits differ between machines, is called.

    Args:
        generator: source of the integers; it advances by ``count`` words.
        count: number of random numbers.
        std: their standard deviation; the mean is 0.

    Returns:
        float32 ``[count]``.
    """
    words = generator.random_raw(count)
    total = np.zeros(count)
    for shift in (0, 16, 32, 48):
        total += (words >> np.uint64(shift) & np.uint64(0xFFFF)).astype(np.float64) - 32767.5
    # A sum of four has a standard deviation of 65536 / sqrt(3).
    return (total * (std * math.sqrt(3.0) / 65536.0)).astype(np.float32)


class ScriptedProposer(Proposer[tuple[int, ...]]):
    """Proposer for tests, which is given the continuations of prompts and proposes them.

    A draft tree is a chain of correct tokens. Each has a wrong token as its sibling, so that the
    tests also see rejections.
    """

    name = "scripted"

    def __init__(
        self, texts: Mapping[tuple[int, ...], Sequence[int]], *, depth: int = 4, astray: int = 5
    ) -> None:
        """Store the texts to propose.

        Args:
            texts: for each prompt its continuation, both as token ids.
            depth: maximum length of a chain.
            astray: where the number of tokens so far is a multiple of this number, one token of the
                chain is replaced by a wrong one.
        """
        self.texts = dict(texts)
        self.depth = depth
        self.astray = astray

    def start(self, prompt: Sequence[int]) -> tuple[int, ...]:
        """Return the request's state: its prompt, which is the key into ``texts``."""
        return tuple(prompt)

    def propose(self, contexts: Sequence[DraftContext[tuple[int, ...]]]) -> list[TokenTree]:
        """Return a draft tree for each context.

        The tree is only a root if the prompt is unknown or its continuation has ended.
        """
        return [self._tree(context) for context in contexts]

    def _tree(self, context: DraftContext[tuple[int, ...]]) -> TokenTree:
        length = len(context.tokens)
        text = [*context.state, *self.texts.get(context.state, ())]
        max_length = min(self.depth, context.max_depth, context.max_nodes // 2)
        chain = text[length : length + max_length]
        if chain and length % self.astray == 0:
            chain[length % len(chain)] = text[0]
        tokens = [context.tokens[-1], *chain]
        parents = list(range(-1, len(chain)))
        wrong_sibling = text[-1]
        for parent, token in enumerate(chain):
            if token != wrong_sibling:
                tokens.append(wrong_sibling)
                parents.append(parent)
        return TokenTree(tuple(tokens), tuple(parents))


def assert_lossless(
    llm: LLM,
    drafter: str | Drafter,
    prompts: Sequence[str],
    *,
    max_tokens: int = 48,
    guesses: bool = True,
) -> None:
    """Assert that a drafter does not change the texts, for single prompts and for a batch.

    The texts are generated greedily, by sampling, and by sampling with penalties.

    Args:
        llm: the model. With ``guesses``, it must be loaded with ``budget="all"``: with
            ``"auto"``, measured times decide whether draft tokens are verified, and on a busy
            machine none may be.
        drafter: drafter to test.
        prompts: texts to continue; include some for which the drafter proposes.
        max_tokens: length of each continuation.
        guesses: whether to fail if no draft token was verified, because the comparison would then
            test nothing. With ``False``, only the texts are compared.

    Raises:
        AssertionError: a text differs, the drafter raised an exception, or no draft token was
            verified.
        ValueError: ``guesses`` is true, and the model is loaded with ``budget="auto"``.
    """
    if guesses and llm.engine.speculator.budget:
        msg = (
            'guesses: expected a model loaded with budget="all", found budget="auto", with which '
            'measured times decide what is drafted; load with budget="all", or give guesses=False'
        )
        raise ValueError(msg)
    drafted = 0
    for options in _SAMPLING_OPTIONS:
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, **options)
        plain = llm.generate(list(prompts), params, drafter="autoregressive")
        alone = [llm.generate(prompt, params, drafter=drafter) for prompt in prompts]
        batched = llm.generate(list(prompts), params, drafter=drafter)
        for mode, completions in (("alone", alone), ("in a batch", batched)):
            for prompt, want, got in zip(prompts, plain, completions, strict=True):
                where = f"{prompt!r}, {options or 'greedy'}, {mode}"
                if got.stats.draft_error is not None:
                    msg = f"{where}: the drafter raised {got.stats.draft_error}"
                    raise AssertionError(msg)
                if got.token_ids != want.token_ids:
                    first = _first_difference(got.token_ids, want.token_ids)
                    expected = "expected the tokens of plain decoding"
                    msg = f"{where}: {expected}, found others from number {first} on"
                    raise AssertionError(msg)
                drafted += got.stats.drafted
    if guesses and not drafted:
        msg = "expected draft tokens, found none; add prompts for which the drafter proposes"
        raise AssertionError(msg)


def _first_difference(got: Sequence[int], want: Sequence[int]) -> int | str:
    """Return the index of the first token that differs; "its end" without such a token."""
    for index, (token, plain_token) in enumerate(zip(got, want, strict=False)):
        if token != plain_token:
            return index
    return "its end"
