"""Random assistants of Gemma 4 in the files of transformers, and its forward pass as the oracle."""

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import Gemma4TextConfig
from transformers.models.gemma4_assistant import (
    Gemma4AssistantConfig,
    Gemma4AssistantForCausalLM,
)

from checkpoints import load_with_transformers
from drafting.from_target.trained_eagle import bigram_module
from drafting.helpers import CHECKPOINTS
from pronk.base.arrays import Array
from tiny_models import VOCAB

_SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": 0,
    "use_double_wide_mlp": False,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
    "eos_token_id": 1,
}
# Two layers of each kind of attention, for the family ``gemma4_text`` of ``checkpoints.py``.
_FOR_GEMMA4: dict[str, Any] = _SIZES | {
    "vocab_size": 300,
    "num_hidden_layers": 4,
    "num_kv_shared_layers": 4,
    "head_dim": 8,
    "global_head_dim": 16,
    "sliding_window": 8,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}
# For models whose layers have full attention and plain rotations, such as
# ``tiny_models.tiny_decoder``.
_FOR_LLAMA: dict[str, Any] = _SIZES | {
    "vocab_size": VOCAB,
    "num_hidden_layers": 2,
    "num_kv_shared_layers": 2,
    "head_dim": 16,
    "global_head_dim": 16,
    "layer_types": ["full_attention"] * 2,
    "rope_parameters": {
        "full_attention": {"rope_type": "default", "rope_theta": 10000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    },
}


def random_assistant(
    sizes: dict[str, Any], width: int, *, clusters: int = 0, seed: int = 0
) -> Gemma4AssistantForCausalLM:
    """Return an assistant with random weights for a target of hidden size ``width``.

    With ``clusters``, its head has two stages, and a third of the clusters is chosen.
    """
    config = Gemma4AssistantConfig(
        text_config=Gemma4TextConfig(**sizes),
        backbone_hidden_size=width,
        use_ordered_embeddings=clusters > 0,
        num_centroids=clusters or 2048,
        centroid_intermediate_top_k=max(1, clusters // 3),
    )
    model = Gemma4AssistantForCausalLM(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("q_norm.weight"):
                # Attention scores have no other scale, and large ones magnify errors of rounding.
                parameter.uniform_(0.1, 0.4, generator=generator)
            elif parameter.dim() == 1:
                parameter.uniform_(0.5, 1.5, generator=generator)
            else:
                scale = parameter.shape[1] ** -0.5
                parameter.normal_(0.0, scale, generator=generator)
        for name, buffer in model.named_buffers():
            if name.endswith("layer_scalar"):
                buffer.uniform_(0.5, 0.9, generator=generator)
        if clusters:
            tokens = torch.randperm(sizes["vocab_size"], generator=generator)
            model.masked_embedding.token_ordering.copy_(tokens)
    return model


def write_for_gemma4(folder: Path, width: int, *, clusters: int = 0) -> Path:
    """Write an assistant for a ``gemma4_text`` of ``checkpoints.py``; return the folder."""
    random_assistant(_FOR_GEMMA4, width, clusters=clusters).save_pretrained(folder)
    return folder


def write_for_llama(folder: Path, vocab: int, width: int, *, clusters: int = 0) -> Path:
    """Write an assistant for a model with heads of 16 elements; return the folder."""
    sizes = _FOR_LLAMA | {"vocab_size": vocab}
    random_assistant(sizes, width, clusters=clusters).save_pretrained(folder)
    return folder


@cache
def random_folder(clusters: int = 0) -> str:
    """Return the folder of an assistant for ``tiny_models.tiny_decoder``, written once.

    With ``clusters`` (131 is a prime), its head has two stages.
    """
    return str(write_for_llama(CHECKPOINTS / f"assistant-{clusters}", VOCAB, 64, clusters=clusters))


def spec(clusters: int = 0, **options: object) -> str:
    """Return the specification of a random assistant for tests of all drafters."""
    given = "".join(f", {name}={value!r}" for name, value in options.items())
    return f"gemma4_assistant(model={random_folder(clusters)!r}{given})"


@cache
def copying_folder(clusters: int = 0) -> str:
    """Return the folder of an assistant that is right for ``trained_eagle.bigram_decoder``.

    Its layers add nothing to the embedding of the row's token; norm and head are the target's.
    """
    target = bigram_module()
    model = random_assistant(_FOR_LLAMA | {"hidden_size": 64}, 64, clusters=clusters)
    eye = torch.eye(64)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
            layer.layer_scalar.fill_(1.0)
        model.pre_projection.weight.copy_(torch.cat([eye, 0.0 * eye], dim=1))
        model.model.norm.weight.copy_(target.norm.weight)
        model.model.embed_tokens.weight.copy_(target.head.weight)
    folder = CHECKPOINTS / f"copying-assistant-{clusters}"
    model.save_pretrained(folder)
    return str(folder)


class AssistantOracle:
    """The assistant of transformers beside the target of transformers, without any cache.

    For each text, the target computes all keys and values again. A row sees those of the text
    before its last token, and with a window ``w`` the last ``w - 1`` of them.
    """

    def __init__(self, target: Path, assistant: Path) -> None:
        self.target = load_with_transformers(target, torch.float32)
        self.assistant = Gemma4AssistantForCausalLM.from_pretrained(assistant).eval()
        self.window: int = self.target.config.sliding_window

    @torch.no_grad()
    def begin(self, text: Sequence[int]) -> None:
        """Begin a proposal after ``text``, of at least two tokens."""
        out = self.target.model(
            torch.tensor([text[:-1]]), use_cache=False, return_shared_kv_states=True
        )
        self.state = out.last_hidden_state[:, -1:]
        kinds = ("full_attention", "sliding_attention")
        self.keys = {kind: tuple(out.shared_kv_states[kind]) for kind in kinds}
        first = max(0, len(text) - self.window)
        sliding = self.keys["sliding_attention"]
        self.keys["sliding_attention"] = tuple(each[:, :, first:] for each in sliding)
        self.position = len(text) - 1
        self.add(text[-1])

    @torch.no_grad()
    def add(self, token: int) -> None:
        """Run a row with this token, and keep its logits and its state."""
        embedding = self.target.get_input_embeddings()(torch.tensor([[token]]))
        out = self.assistant(
            inputs_embeds=torch.cat([embedding, self.state], dim=-1),
            position_ids=torch.tensor([[self.position]]),
            shared_kv_states=self.keys,
        )
        self.state = out.last_hidden_state
        self.logits: Array = out.logits[0, 0].numpy().astype(np.float32)
        if self.assistant.masked_embedding is not None:
            # In transformers, tokens of other clusters have a logit that is 1 below all others,
            # with which noise could choose them.
            self.logits[self.logits == self.logits.min()] = -1e6
