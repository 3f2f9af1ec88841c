"""For tests of what is built on pronk: a tiny model, a tokenizer that fits it, a drafter that knows what comes next.

::

    def test_my_drafter(tmp_path):
        llm = LLM(tiny_checkpoint(tmp_path))
        assert_lossless(llm, MyDrafter(), ["def add(a, b):", "the quick brown fox"])
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from pronk.drafters import DraftContext, Drafter, Outcome, Proposer
from pronk.llm import LLM
from pronk.sampling.params import SamplingParams
from pronk.speculation.tree import TokenTree

__all__ = ["ScriptedProposer", "assert_lossless", "byte_tokenizer", "tiny_checkpoint"]

_TEXT = (
    "def add(a, b):\n    return a + b\n\n\ndef mean(values):\n    return sum(values) / len(values)\n",
    "The quick brown fox jumps over the lazy dog, and then the dog sleeps in the sun.",
    "for i in range(10):\n    print(i, i * i)\n",
    "Grüße aus Köln — naïve café, 東京と大阪, 🙂🙃",
)

_OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0.8, "seed": 1},
    {"temperature": 1.0, "seed": 2, "top_p": 0.9, "repetition_penalty": 1.2, "frequency_penalty": 0.2},
)


def byte_tokenizer(vocab_size: int = 300) -> Tokenizer:
    """A byte-level BPE of at most ``vocab_size`` ids: id 0 ends a text, 256 bytes, then as many merges as fit."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_TEXT, trainer)
    return tokenizer


def tiny_checkpoint(folder: Path, *, seed: int = 0, layers: int = 2, hidden: int = 64, context: int = 512) -> Path:
    """A folder with a random Llama of 300 ids in float32, loadable by :class:`~pronk.llm.LLM` within milliseconds.

    Its weights are so large that the likeliest token has a probability of about a half, as in a trained model, and
    that greedy texts do not loop: a comparison of texts says something.

    Args:
        folder: where it goes; made if it is not there.
        seed: of its weights.
        layers: at least 1.
        hidden: size of a row, a multiple of 32.
        context: most positions.
    """
    vocab, heads, width = 300, hidden // 16, 2 * hidden
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
    shapes |= {"mlp.gate_proj": (width, hidden), "mlp.up_proj": (width, hidden), "mlp.down_proj": (hidden, width)}
    generator = torch.Generator().manual_seed(seed)

    def matrix(rows: int, columns: int, scale: float) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator) * scale

    tensors = {"model.embed_tokens.weight": matrix(vocab, hidden, 0.7), "model.norm.weight": torch.ones(hidden)}
    tensors["lm_head.weight"] = matrix(vocab, hidden, 2.5 * hidden**-0.5)
    for layer in range(layers):
        place = f"model.layers.{layer}"
        for name, (rows, columns) in shapes.items():
            tensors[f"{place}.{name}.weight"] = matrix(rows, columns, 1.2 * columns**-0.5)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{place}.{norm}.weight"] = torch.ones(hidden)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    byte_tokenizer(vocab).save(str(folder / "tokenizer.json"))
    return folder


class ScriptedProposer(Proposer[tuple[int, ...]]):
    """Knows how texts go on, and errs now and then: guesses a chain of the truth, with a wrong token beside each."""

    name = "scripted"

    def __init__(self, texts: Mapping[tuple[int, ...], Sequence[int]], *, depth: int = 4, astray: int = 5) -> None:
        """``texts`` are prompts and what follows each, as token ids; one of ``astray`` chains has a wrong token."""
        self.texts, self.depth, self.astray = dict(texts), depth, astray

    def start(self, prompt: Sequence[int]) -> tuple[int, ...]:
        """The prompt, which tells the texts apart."""
        return tuple(prompt)

    def propose(self, contexts: Sequence[DraftContext[tuple[int, ...]]]) -> list[TokenTree]:
        """What follows each text, or nothing where it is unknown."""
        return [self._tree(context) for context in contexts]

    def observe(self, outcome: Outcome[tuple[int, ...]]) -> None:
        """Nothing to learn."""

    def _tree(self, context: DraftContext[tuple[int, ...]]) -> TokenTree:
        length = len(context.tokens)
        text = [*context.state, *self.texts.get(context.state, ())]
        truth = text[length : length + min(self.depth, context.max_depth, context.max_nodes // 2)]
        if truth and length % self.astray == 0:
            truth[length % len(truth)] = text[0]
        tokens, parents = [context.tokens[-1], *truth], [*range(-1, len(truth))]
        for above, token in enumerate(truth):
            if token != text[-1]:
                tokens.append(text[-1])
                parents.append(above)
        return TokenTree(tuple(tokens), tuple(parents))


def assert_lossless(
    llm: LLM, drafter: str | Drafter, prompts: Sequence[str], *, max_tokens: int = 48, guesses: bool = True
) -> None:
    """Compare the texts of a drafter with those of plain decoding: greedy, sampled and penalized, alone and in a batch.

    Args:
        llm: the model.
        drafter: who guesses.
        prompts: texts to continue; include some that the drafter has something to say about.
        max_tokens: of each text.
        guesses: whether it has to have guessed at all, without which the comparison shows nothing.

    Raises:
        AssertionError: a text differs, the drafter has raised, or it has not guessed.
    """
    drafted = 0
    for options in _OPTIONS:
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, **options)
        plain = llm.generate(list(prompts), params, drafter="autoregressive")
        alone = [llm.generate(prompt, params, drafter=drafter) for prompt in prompts]
        for how, texts in (("alone", alone), ("in a batch", llm.generate(list(prompts), params, drafter=drafter))):
            for prompt, want, got in zip(prompts, plain, texts, strict=True):
                where = f"{prompt!r}, {options or 'greedy'}, {how}"
                if got.stats.draft_error is not None:
                    msg = f"{where}: the drafter raised {got.stats.draft_error}"
                    raise AssertionError(msg)
                if got.token_ids != want.token_ids:
                    pairs = enumerate(zip(got.token_ids, want.token_ids, strict=False))
                    place = next((i for i, (one, other) in pairs if one != other), "its end")
                    msg = f"{where}: expected the tokens of plain decoding, found others from number {place} on"
                    raise AssertionError(msg)
                drafted += got.stats.drafted
    if guesses and not drafted:
        msg = "expected guesses, found none: nothing was shown; add prompts that the drafter has something to say about"
        raise AssertionError(msg)
