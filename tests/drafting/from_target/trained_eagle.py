"""Random EAGLE-3 and MTP heads for tests, in every layout, and a reference written from the
formulas.

The reference computes a text without any cache: the target's hidden states by torch, the head by
loops over rows in NumPy. A *copying* head has the embedding of the row's token as its output. It is
right where the target's own layers change little (:func:`bigram_decoder`), so that draft tokens are
accepted.
"""

import json
from collections.abc import Sequence
from copy import copy, deepcopy
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors.numpy import save_file

from drafting.helpers import CHECKPOINTS
from oracle import DenseModel, to_array, torch_dtype
from pronk import LLM
from pronk.base.arrays import FLOAT32, Array, DType
from pronk.models.decoder import Decoder
from pronk.models.linear import WeightLayout, choose_linear
from tiny_models import VOCAB, decoder_of, kernels, tiny_module

LAYERS = 4  # of the targets
HIDDEN = 64
MLP = 48
DRAFT = 100  # tokens of the draft vocabulary


@dataclass(frozen=True)
class Form:
    """What a head computes: the flags and sizes of the formulas."""

    kind: str = "eagle3"
    sources: tuple[int, ...] = (2, 2, 1)  # the default rule for a target of 4 layers
    fc_norm: bool = False
    norm_before_fc: bool = False
    norm_before_residual: bool = False
    norm_output: bool = False
    qk_norm: bool = False
    bias: bool = False
    layers: int = 1
    wide: int = 1  # first layers that read the embedding, too
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    theta: float = 5000.0
    eps: float = 1e-4
    hidden: int = HIDDEN
    draft: int = DRAFT  # draft vocabulary
    vocab: int = VOCAB
    own_head: bool = True
    own_embedding: bool = False
    embedding_first: bool = True
    zero_first: bool = False


@dataclass
class Head:
    """A head's tensors by the names of the layout speculators, with those of MTP."""

    form: Form
    tensors: dict[str, Array] = field(default_factory=dict)


def random_head(form: Form, seed: int = 0, size: int = HIDDEN) -> Head:
    """Return a head with random weights for a target of this hidden size."""
    dice = np.random.default_rng(seed)
    tensors = dict[str, Array]()
    hidden = form.hidden
    matrices = {"fc": (hidden, 2 * hidden if form.kind == "mtp" else len(form.sources) * size, 1.0)}
    norms = {"norm": hidden}
    if form.kind == "mtp":
        norms |= {"token_norm": hidden, "feature_norm": hidden}
    norms |= {"input_norm": len(form.sources) * size} if form.norm_before_fc else {}
    norms |= {
        f"fc_norm.{number}": size for number in range(len(form.sources) if form.fc_norm else 0)
    }
    if form.own_head:
        matrices["lm_head"] = form.draft, hidden, 4.0
    for layer in range(form.layers):
        own_matrices, own_norms = _random_layer(form, layer)
        matrices = matrices | own_matrices
        norms = norms | own_norms
    for name, (outputs, inputs, gain) in matrices.items():
        weight = gain * inputs**-0.5 * dice.standard_normal((outputs, inputs))
        tensors[f"{name}.weight"] = weight.astype(np.float32)
        if form.bias and name.endswith(("q_proj", "k_proj", "v_proj")):
            tensors[f"{name}.bias"] = (0.3 * dice.standard_normal(outputs)).astype(np.float32)
    for name, width in norms.items():
        tensors[f"{name}.weight"] = dice.uniform(0.5, 1.5, width).astype(np.float32)
    if form.own_embedding:
        tensors["embed_tokens.weight"] = dice.standard_normal((form.vocab, hidden)).astype(
            np.float32
        )
    if form.draft < form.vocab:
        ids = np.sort(dice.permutation(form.vocab)[: form.draft])
        tensors["d2t"] = ids - np.arange(form.draft)
        tensors["t2d"] = np.isin(np.arange(form.vocab), ids)
    return Head(form, tensors)


def _random_layer(
    form: Form, layer: int
) -> tuple[dict[str, tuple[int, int, float]], dict[str, int]]:
    """Return (outputs, inputs, gain) of the matrices of a layer, and the sizes of its norms."""
    at = f"layers.{layer}"
    hidden = form.hidden
    wide = form.kind == "eagle3" and layer < form.wide
    matrices = {
        f"{at}.self_attn.{name}_proj": (heads * form.head_dim, 2 * hidden if wide else hidden, 2.0)
        for name, heads in (("q", form.heads), ("k", form.kv_heads), ("v", form.kv_heads))
    }
    matrices[f"{at}.self_attn.o_proj"] = hidden, form.heads * form.head_dim, 1.0
    sizes = {"gate": (MLP, hidden), "up": (MLP, hidden), "down": (hidden, MLP)}
    matrices |= {f"{at}.mlp.{name}_proj": (*size, 1.0) for name, size in sizes.items()}
    norms = {f"{at}.{name}": hidden for name in ("input_layernorm", "post_attention_layernorm")}
    if wide:
        norms[f"{at}.hidden_norm"] = hidden
    if form.qk_norm:
        norms |= {f"{at}.self_attn.{name}_norm": form.head_dim for name in "qk"}
    return matrices, norms


def copying_form(kind: str) -> Form:
    """Return the form of :func:`copying_head`: the residual connection must not add the output of
    the row before.
    """
    flags = {"norm_output": True} if kind == "mtp" else {"norm_before_residual": True}
    return Form(kind, kv_heads=4, heads=4, own_head=False, draft=VOCAB, **flags)


def copying_head(target: DenseModel, form: Form, *, noise: float = 0.0) -> Head:
    """Return a head whose output is the embedding of the row's token, and whose norm and LM head
    are the target's.

    Attention sees little but the row itself: queries and keys are the normed embedding, enlarged.
    ``noise`` is the share of the head's own MLP, and of the feature, in the output.
    """
    head = random_head(form, seed=1)
    eye = np.eye(HIDDEN, dtype=np.float32)
    tensors = head.tensors
    nothing = np.zeros_like(eye)
    tensors["norm.weight"] = to_array(target.norm.weight.float())
    tensors["layers.0.mlp.down_proj.weight"] *= noise
    if form.kind == "mtp":
        tensors["layers.0.self_attn.o_proj.weight"] *= noise
        pair = (eye, noise * eye) if form.embedding_first else (noise * eye, eye)
        tensors["fc.weight"] = np.concatenate(pair, axis=1)
        tensors["token_norm.weight"] = np.ones(HIDDEN, np.float32)
    else:
        tensors["fc.weight"] *= noise
        for name, scale in (("q", 3.0), ("k", 3.0), ("v", 1.0)):
            tensors[f"layers.0.self_attn.{name}_proj.weight"] = np.concatenate(
                (scale * eye, nothing), axis=1
            )
        tensors["layers.0.self_attn.o_proj.weight"] = eye
        tensors["layers.0.input_layernorm.weight"] = np.ones(HIDDEN, np.float32)
        tensors["layers.0.hidden_norm.weight"] *= noise
    return head


LAYOUTS = ("speculators", "eagle", "deepspec", "mtp", "mimo", "deepseek", "qwen")


def write_head(
    head: Head, folder: Path, layout: str = "speculators", *, verifier: str = "tiny", **changes: Any
) -> Path:
    """Write a head in a layout; ``changes`` replace keys of ``config.json``, and ``None`` removes
    them.

    ``verifier`` is the name of the target in the layouts of speculators.
    """
    form = head.form
    decoder = {
        "model_type": "qwen3" if form.qk_norm else "llama",
        "hidden_size": form.hidden,
        "intermediate_size": MLP,
        "num_hidden_layers": form.layers,
        "num_attention_heads": form.heads,
        "num_key_value_heads": form.kv_heads,
        "head_dim": form.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": form.eps,
        "vocab_size": form.vocab,
        "max_position_embeddings": 4096,
        "rope_theta": form.theta,
    }
    flags = {
        name: getattr(form, name)
        for name in ("fc_norm", "norm_before_fc", "norm_before_residual", "norm_output")
    }
    if layout in ("speculators", "mtp"):
        document: dict[str, Any] = {
            "architectures": ["Eagle3DraftModel"],
            "speculators_model_type": form.kind,
            "speculators_config": {
                "algorithm": form.kind,
                "verifier": {"name_or_path": verifier, "architectures": []},
            },
            "transformer_layer_config": decoder,
        }
        if form.kind == "eagle3":
            document |= {
                "draft_vocab_size": form.draft,
                "eagle_aux_hidden_state_layer_ids": list(form.sources),
                **flags,
            }
    elif layout == "eagle":
        # AvitoTech's heads give the target's number of layers.
        document = {
            "architectures": ["LlamaForCausalLMEagle3"],
            **decoder,
            "num_hidden_layers": 36,
            **flags,
        }
        document |= {"draft_vocab_size": form.draft}
        document["eagle_config"] = {
            "eagle_aux_hidden_state_layer_ids": list(form.sources),
            "use_aux_hidden_state": True,
        }
    elif layout == "deepspec":
        ids = [source - 1 for source in form.sources]
        document = {
            "architectures": ["Qwen3Eagle3Model"],
            **decoder,
            "target_layer_ids": ids,
            "ttt_length": 7,
        }
    else:
        document = {"architectures": ["Any"], **decoder}
    if form.hidden != HIDDEN:
        document["target_hidden_size"] = HIDDEN
    document = {key: value for key, value in (document | changes).items() if value is not None}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(document))
    tensors = {_name_in(layout, name): tensor for name, tensor in head.tensors.items()}
    if layout in ("mimo", "deepseek", "qwen"):  # the target's own tensors are in the same file
        tensors["model.layers.0.mlp.up_proj.weight"] = np.zeros((3, 3), np.float32)
    save_file(tensors, folder / "model.safetensors")
    return folder


def write_random_head(llm: LLM, folder: Path) -> Path:
    """Write an EAGLE-3 head with random weights for a loaded model; return its folder."""
    size = llm.config.hidden_size
    vocab = llm.config.vocab_size
    form = Form(sources=(1, 1, 2), hidden=size, vocab=vocab, draft=vocab // 4)
    head = random_head(form, size=size)
    return write_head(head, folder, verifier=llm.path.name, target_hidden_size=size)


def _name_in(layout: str, name: str) -> str:
    """Return the name of a tensor in a layout."""
    module, _, rest = name.partition(".")
    if layout == "eagle":
        return name.replace("layers.0.", "midlayer.")
    own = {
        "mtp": (
            "mtp_layers.0.",
            "token_layernorm",
            "hidden_layernorm",
            "input_proj",
            "final_layernorm",
        ),
        "deepseek": ("model.layers.61.", "enorm", "hnorm", "eh_proj", "shared_head.norm"),
        "qwen": ("mtp.", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm"),
    }
    own["mimo"] = ("model.mtp_layers.0.", *own["mtp"][1:])
    if layout not in own or module in ("d2t", "t2d"):
        return name
    prefix, *modules = own[layout]
    renamed = dict(zip(("token_norm", "feature_norm", "fc", "norm"), modules, strict=True))
    if module in renamed:
        return f"{prefix}{renamed[module]}.{rest}"
    if module == "layers":
        return prefix + (name if layout == "qwen" else name.removeprefix("layers.0."))
    return prefix + ("shared_head.head.weight" if module == "lm_head" else name)


class Rows(NamedTuple):
    """What a head has computed for a text and draft tokens below its last token.

    Attributes:
        pairs: feature and embedding of each token.
        outputs: output of each token, which depends on the tokens before.
    """

    pairs: list[tuple[Array, Array]]
    outputs: list[Array]


class Reference:
    """A head's outputs, computed from the formulas for one text at a time, without a KV cache."""

    def __init__(self, head: Head, target: DenseModel) -> None:
        self.form = head.form
        self.tensors = head.tensors
        self.target = target
        self.exact = deepcopy(target).double()
        own = self.tensors.get("embed_tokens.weight")
        self.embedding = to_array(target.embedding.float()) if own is None else own
        self._known = dict[tuple[tuple[int, ...], tuple[int, ...]], Rows]()

    def logits(self, text: Sequence[int], drafted: Sequence[int] = ()) -> Array:
        """Return the logits ``[vocab]`` of the target's tokens after a text and draft tokens below
        its last token.
        """
        last = self.last_output(text, drafted)
        head = self.tensors.get("lm_head.weight")
        own = (to_array(self.target.head.weight.float()) if head is None else head) @ last
        logits = np.full(self.form.vocab, -np.inf)
        for number, value in enumerate(own):
            offset = self.tensors["d2t"][number] if "d2t" in self.tensors else 0
            logits[number + offset] = value
        return logits

    def last_output(self, text: Sequence[int], drafted: Sequence[int] = ()) -> Array:
        """Return the normalized output ``[hidden]`` of the last token."""
        last = self._rows(tuple(text), tuple(drafted)).outputs[-1]
        return last if self.form.norm_output else self._norm("norm", last)

    def _rows(self, text: tuple[int, ...], drafted: tuple[int, ...]) -> Rows:
        """Return the rows of a text and its draft tokens; a chain asks for them with each token."""
        rows = self._known.get((text, drafted))
        if rows is None:
            rows = self._computed_rows(text, drafted)
            self._known[text, drafted] = rows
        return rows

    def _computed_rows(self, text: tuple[int, ...], drafted: tuple[int, ...]) -> Rows:
        if not drafted:
            pairs = self._pairs(text)
            return Rows(pairs, self._outputs(pairs))
        before = self._rows(text, drafted[:-1])
        embedding = self._embed(drafted[-1], len(before.pairs))
        pairs = [*before.pairs, (before.outputs[-1], embedding)]
        return Rows(pairs, [*before.outputs, self._outputs(pairs)[-1]])

    def _pairs(self, text: Sequence[int]) -> list[tuple[Array, Array]]:
        """Return feature and embedding of each row of a text."""
        form = self.form
        layers = tuple(layer for layer in self.form.sources if layer)
        states = self.exact.states(text, torch.float64)
        hidden = {layer: to_array(states[layer]) for layer in layers}
        hidden[0] = to_array(self.target.embedding.float())[list(text)]
        last = to_array(states[-1])
        pairs = []
        for position in range(len(text) - 1):
            if form.kind == "mtp":
                norm = self.target.norm
                feature = _rms(
                    last[position], to_array(norm.weight.float()), self.target.config.norm_eps
                )
            else:
                parts = [hidden[layer][position] for layer in form.sources]
                if form.fc_norm:
                    parts = [
                        self._norm(f"fc_norm.{number}", part) for number, part in enumerate(parts)
                    ]
                joined = np.concatenate(parts)
                feature = self.tensors["fc.weight"] @ (
                    self._norm("input_norm", joined) if form.norm_before_fc else joined
                )
            pairs.append((feature, self._embed(text[position + 1], position)))
        return pairs

    def _embed(self, token: int, position: int) -> Array:
        return np.zeros(HIDDEN) if self.form.zero_first and position == 0 else self.embedding[token]

    def _norm(self, name: str, x: Array) -> Array:
        return _rms(x, self.tensors[f"{name}.weight"], self.form.eps)

    def _outputs(self, rows: Sequence[tuple[Array, Array]]) -> list[Array]:
        """Return the output of each row, which depends on the rows before."""
        form = self.form
        xs = [feature for feature, _ in rows]
        embeddings = [embedding for _, embedding in rows]
        if form.kind == "mtp":
            pairs = []
            for x, e in zip(xs, embeddings, strict=True):
                both = (self._norm("token_norm", e), self._norm("feature_norm", x))
                pairs.append(np.concatenate(both if form.embedding_first else both[::-1]))
            xs = [self.tensors["fc.weight"] @ pair for pair in pairs]
        for layer in range(form.layers):
            at = f"layers.{layer}"
            wide = form.kind == "eagle3" and layer < form.wide
            inputs = list[Array]()
            residuals = list[Array]()
            for x, e in zip(xs, embeddings, strict=True):
                if wide:
                    normed = self._norm(f"{at}.hidden_norm", x)
                    inputs.append(np.concatenate((self._norm(f"{at}.input_layernorm", e), normed)))
                    residuals.append(normed if form.norm_before_residual and layer == 0 else x)
                else:
                    inputs.append(self._norm(f"{at}.input_layernorm", x))
                    residuals.append(x)
            ys = [r + o for r, o in zip(residuals, self._attend(at, inputs), strict=True)]
            xs = [y + self._mlp(at, self._norm(f"{at}.post_attention_layernorm", y)) for y in ys]
        return [self._norm("norm", x) for x in xs] if form.norm_output else xs

    def _mlp(self, at: str, x: Array) -> Array:
        gate, up = (self.tensors[f"{at}.mlp.{name}_proj.weight"] @ x for name in ("gate", "up"))
        return self.tensors[f"{at}.mlp.down_proj.weight"] @ (gate / (1.0 + np.exp(-gate)) * up)

    def _attend(self, at: str, inputs: Sequence[Array]) -> list[Array]:
        form = self.form
        group = self.form.heads // self.form.kv_heads
        q, k, v = (
            [
                self._heads(f"{at}.self_attn.{name}", x, position)
                for position, x in enumerate(inputs)
            ]
            for name in "qkv"
        )
        outputs = []
        for position in range(len(inputs)):
            heads = []
            for number in range(form.heads):
                scores = [q[position][number] @ k[i][number // group] for i in range(position + 1)]
                weights = np.exp((np.array(scores) - max(scores)) / np.sqrt(form.head_dim))
                weights /= weights.sum()
                heads.append(sum(w * v[i][number // group] for i, w in enumerate(weights)))
            outputs.append(self.tensors[f"{at}.self_attn.o_proj.weight"] @ np.concatenate(heads))
        return outputs

    def _heads(self, name: str, x: Array, position: int) -> Array:
        projected = self.tensors[f"{name}_proj.weight"] @ x + self.tensors.get(
            f"{name}_proj.bias", 0.0
        )
        heads = projected.reshape(-1, self.form.head_dim)
        if name.endswith("v"):
            return heads
        if self.form.qk_norm:
            heads = np.stack([self._norm(f"{name}_norm", head) for head in heads])
        half = self.form.head_dim // 2
        angles = position * self.form.theta ** (-2.0 * np.arange(half) / self.form.head_dim)
        first = heads[:, :half]
        second = heads[:, half:]
        cos = np.cos(angles)
        sin = np.sin(angles)
        return np.concatenate((first * cos - second * sin, second * cos + first * sin), axis=1)


def _rms(x: Array, weight: Array, eps: float) -> Array:
    return x / np.sqrt(np.mean(x.astype(np.float64) ** 2) + eps) * weight


@cache
def bigram_module(dtype: DType = FLOAT32, *, calm: float = 0.002) -> DenseModel:
    """Return a target whose layers add ``calm`` times their usual output to the embedding."""
    module = deepcopy(tiny_module(windows=(None,) * LAYERS))
    for layer in module.layers:
        for linear in (layer.out, layer.down):
            linear.weight.mul_(calm)
    return module.to(torch_dtype(dtype))


@cache
def bigram_decoder(
    dtype: DType = FLOAT32, *, weights: str = "plain", calm: float = 0.002
) -> Decoder:
    """Return the decoder of :func:`bigram_module`."""
    return decoder_of(bigram_module(dtype, calm=calm), kernels(), weights)


@cache
def decoder_with_table() -> Decoder:
    """Return :func:`bigram_decoder` with an embedding of 8 bits, as in GGUF files."""
    decoder = copy(bigram_decoder())
    linear = choose_linear(decoder.kernels, "int8")
    decoder.table = linear(decoder.embedding, None, WeightLayout(head=True))
    decoder.embedding = np.empty((0, HIDDEN), np.float32)
    return decoder


@cache
def copying_folder(kind: str = "eagle3", noise: float = 0.02, calm: float = 0.002) -> str:
    """Return the folder of a copying head for :func:`bigram_decoder`."""
    head = copying_head(bigram_module(calm=calm), copying_form(kind), noise=noise)
    layout = "speculators" if kind == "eagle3" else "mtp"
    return str(write_head(head, CHECKPOINTS / f"copying-{kind}-{noise}-{calm}", layout))


@cache
def random_folder(kind: str = "eagle3") -> str:
    """Return the folder of a random head for :func:`tiny_models.tiny_decoder` of any number of
    layers.
    """
    form = Form(
        kind,
        draft=VOCAB if kind == "mtp" else DRAFT,
        norm_output=kind == "mtp",
        own_head=kind != "mtp",
    )
    head = random_head(form)
    layout = "speculators" if kind == "eagle3" else "mtp"
    return str(write_head(head, CHECKPOINTS / f"random-{kind}", layout))


@cache
def block_folder() -> str:
    """Return the folder of a random MTP block with gated attention and experts.

    It is that of a Qwen3.5-MoE for :func:`tiny_models.tiny_decoder`, without the model's layers.
    """
    heads = 4
    head_dim = 16
    experts = 4
    width = 24
    sizes = {
        "fc": (HIDDEN, 2 * HIDDEN),
        "layers.0.self_attn.q_proj": (2 * heads * head_dim, HIDDEN),
        "layers.0.self_attn.k_proj": (2 * head_dim, HIDDEN),
        "layers.0.self_attn.v_proj": (2 * head_dim, HIDDEN),
        "layers.0.self_attn.o_proj": (HIDDEN, heads * head_dim),
        "layers.0.mlp.gate": (experts, HIDDEN),
        "layers.0.mlp.shared_expert_gate": (1, HIDDEN),
    }
    names = ["shared_expert", *(f"experts.{number}" for number in range(experts))]
    for name in names:
        sizes[f"layers.0.mlp.{name}.gate_proj"] = (width, HIDDEN)
        sizes[f"layers.0.mlp.{name}.up_proj"] = (width, HIDDEN)
        sizes[f"layers.0.mlp.{name}.down_proj"] = (HIDDEN, width)
    norms = dict.fromkeys(("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"), HIDDEN)
    norms |= {f"layers.0.{name}_layernorm": HIDDEN for name in ("input", "post_attention")}
    norms |= {f"layers.0.self_attn.{name}_norm": head_dim for name in "qk"}
    dice = np.random.default_rng(0)
    tensors = {
        f"mtp.{name}.weight": (inputs**-0.5 * dice.standard_normal((outputs, inputs)))
        for name, (outputs, inputs) in sizes.items()
    }
    tensors |= {f"mtp.{name}.weight": dice.uniform(-0.5, 0.5, n) for name, n in norms.items()}
    document = {
        "model_type": "qwen3_5_moe_text",
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "num_hidden_layers": 4,
        "num_attention_heads": heads,
        "num_key_value_heads": 2,
        "head_dim": head_dim,
        "num_experts": experts,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": width,
        "shared_expert_intermediate_size": width,
    }
    folder = CHECKPOINTS / "random-block"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(document))
    stored = {name: tensor.astype(np.float32) for name, tensor in tensors.items()}
    save_file(stored, folder / "model.safetensors")
    return str(folder)


def block_spec() -> str:
    """Return the specification of :func:`block_folder`, with a head of few tokens."""
    return f"mtp(model={block_folder()!r}, draft_vocab=100)"


def spec(kind: str = "eagle3", **options: object) -> str:
    """Return the specification of a random head for tests of all drafters."""
    given = "".join(f", {name}={value!r}" for name, value in options.items())
    return f"{kind}(model={random_folder(kind)!r}{given})"
