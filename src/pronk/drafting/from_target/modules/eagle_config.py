"""Configuration of a trained EAGLE-3 (Li et al. 2025) or MTP head, and its reader for all layouts.

=============  ===================================================================================
layout         ``config.json``
=============  ===================================================================================
speculators    ``speculators_model_type``; the decoder's keys in ``transformer_layer_config``
EAGLE          flat: the decoder's keys, ``draft_vocab_size``, ``eagle_config``; SpecForge, too
DeepSpec       flat: ``Qwen3Eagle3Model``; ``target_layer_ids`` counts layers from 0
target         an MTP head in the checkpoint of its target, a folder or a GGUF file: its layer has
               the sizes of the target's last layer with attention
=============  ===================================================================================

``pronk train`` writes the layout speculators (:meth:`EagleConfig.document`), which vLLM and SGLang
read, with one more key: ``pronk``, an object with the fingerprint of the target.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from pronk.base.checks import check_flag, check_integer
from pronk.base.errors import ConfigError, OptionError
from pronk.checkpoint.config import ModelConfig
from pronk.checkpoint.rope import RopeConfig
from pronk.drafting.from_target.modules.eagle_names import EAGLE_NAMES, HeadNames, find_mtp_names
from pronk.models.families import get_family, parse_config
from pronk.models.family import TensorNames
from pronk.models.loader import Fingerprint

EAGLE_KINDS = ("eagle3", "mtp")
_LAYER_NAME = re.compile(r"layers\.(\d{1,9})\.")  # beginning of the names of a layer's tensors
# Last parts of the names of tensors that are not quantized; the last two are those of experts.
_PLAIN_TENSORS = frozenset(
    ("weight", "bias", "e_score_correction_bias", "gate_up_proj", "down_proj")
)
_FLAGS = ("fc_norm", "norm_before_fc", "norm_before_residual", "norm_output")

# Keys of a decoder's configuration: those that are read, and those that do not change what a head
# computes.
_DECODER_KEYS = frozenset(
    "model_type hidden_size intermediate_size num_hidden_layers num_attention_heads "
    "num_key_value_heads head_dim "
    "hidden_act rms_norm_eps vocab_size max_position_embeddings attention_bias mlp_bias "
    "tie_word_embeddings rope_theta "
    "rope_scaling rope_parameters partial_rotary_factor sliding_window use_sliding_window "
    "max_window_layers "
    "layer_types dtype torch_dtype bos_token_id eos_token_id pad_token_id unk_token_id "
    "attention_dropout "
    "initializer_range use_cache pretraining_tp transformers_version architectures _name_or_path "
    "is_decoder "
    "chunk_size_feed_forward output_attentions output_hidden_states return_dict id2label label2id "
    "problem_type "
    "_attn_implementation_autoset".split()
)
_HEAD_KEYS = frozenset(
    (
        "draft_vocab_size",
        "target_hidden_size",
        "num_centroids",
        "centroid_intermediate_top_k",
        "quantization_config",
        "pronk",
        *_FLAGS,
    )
)
_SPECULATORS_KEYS = _HEAD_KEYS | frozenset(
    "architectures speculators_model_type speculators_config speculators_version "
    "transformer_layer_config model_type "
    "eagle_aux_hidden_state_layer_ids embed_requires_grad enable_sp_ulysses "
    "has_no_defaults_at_init auto_map base_model_ep_plan "
    "num_nextn_predict_layers dtype torch_dtype transformers_version tie_word_embeddings".split()
)
_EAGLE_KEYS = (
    _HEAD_KEYS
    | _DECODER_KEYS
    | frozenset(("eagle_config", "target_model_type", "eagle_aux_layers"))
)
_DEEPSPEC_KEYS = _DECODER_KEYS | frozenset(
    "num_target_layers target_model_name_or_path target_layer_ids ttt_length step_loss_decay "
    "draft_num_hidden_layers "
    "quantization_config pronk".split()
)


def default_sources(num_layers: int) -> tuple[int, int, int]:
    """Return the target's layers that an EAGLE-3 head reads by default (from 1; 0: embedding)."""
    return min(2, num_layers), num_layers // 2, max(num_layers - 3, 0)


@dataclass(frozen=True)
class EagleConfig:
    """Sizes and features of a head; the formulas are in :mod:`.eagle`.

    Attributes:
        kind: ``"eagle3"`` or ``"mtp"``.
        layers: the head's decoder layers; ``vocab_size`` is that of the target and of the head's
            embedding.
        draft_vocab_size: number of tokens that the head can propose.
        target_hidden_size: width of the target's hidden states.
        num_clusters: number of clusters of the file's two-stage head; 0: the head has one stage.
        num_best: number of clusters whose tokens get logits.
        sources: layers of the target (from 1; 0 is the embedding) that EAGLE-3 reads; ``None`` is
            the default rule.
        fc_norm: each hidden state is normed before ``fc`` (EAGLE-3.1).
        norm_before_fc: the concatenation of the hidden states is normed before ``fc``.
        norm_before_residual: the residual connection of the first layer begins with the normed
            feature.
        norm_output: the next depth reads the layers' output after the final norm (EAGLE-3.1), not
            before.
        num_wide: number of first layers whose attention also reads the embedding: input of twice
            the hidden size.
        names: names of the tensors, and the order of MTP's input.
        verifier: name of the target in the file.
        fingerprint: fingerprint of the target, if ``pronk train`` has written the file.
    """

    kind: str
    layers: ModelConfig
    draft_vocab_size: int
    target_hidden_size: int
    sources: tuple[int, ...] | None = None
    fc_norm: bool = False
    norm_before_fc: bool = False
    norm_before_residual: bool = False
    norm_output: bool = False
    num_wide: int = 1
    names: HeadNames = EAGLE_NAMES
    verifier: str | None = None
    fingerprint: Fingerprint | None = None
    num_clusters: int = 0
    num_best: int = 32

    def __post_init__(self) -> None:
        if self.fc_norm and self.norm_before_fc:
            msg = "config.json: expected fc_norm or norm_before_fc, found both"
            raise ConfigError(msg)
        if self.draft_vocab_size > self.layers.vocab_size:
            most = f"vocab_size = {self.layers.vocab_size}"
            msg = (
                f"config.json: draft_vocab_size: expected at most {most}, found "
                f"{self.draft_vocab_size}"
            )
            raise ConfigError(msg)

    def sources_of(self, num_layers: int) -> tuple[int, ...]:
        """Return the layers whose outputs the head reads, of a target with ``num_layers`` layers.

        ``i`` is the output of the target's first ``i`` layers: 0 is the embedding.

        Raises:
            ConfigError: the head reads layers that the target does not have.
        """
        if self.kind == "mtp":
            return (num_layers,)
        sources = default_sources(num_layers) if self.sources is None else self.sources
        if max(sources) > num_layers:
            msg = (
                f"config.json: expected layers 0 to {num_layers} of the target, found "
                f"{list(sources)}"
            )
            raise ConfigError(msg)
        return sources

    @classmethod
    def in_target(
        cls, target: ModelConfig, family: TensorNames, stored: Collection[str]
    ) -> EagleConfig:
        """Return the configuration of the MTP head in the checkpoint of its target.

        Args:
            target: configuration of the target.
            family: names of the tensors in the target's checkpoint.
            stored: names of all tensors of the checkpoint.

        Raises:
            ConfigError: there is no MTP head among the tensors.
            OptionError: the target's layers are of a kind that no head has.
        """
        names = find_mtp_names(stored)
        if names is None:
            msg = (
                "expected tensors of an MTP head (mtp_layers, mtp, eh_proj or nextn), found none; "
                "use a checkpoint that has one"
            )
            raise ConfigError(msg)
        attention = [layer for layer in range(target.num_layers) if target.has_attention(layer)]
        for kind, is_other in (
            ("multi-head latent attention", target.latent is not None),
            ("attention or an MLP alone", bool(target.sublayers)),
            ("a recurrence alone", not attention),
        ):
            if is_other:
                msg = (
                    f"expected an MTP layer with keys and values for each head, and an MLP, found "
                    f"a {target.family} with layers of {kind}; use another drafter"
                )
                raise OptionError(msg)
        names = names.with_layer_of(family, stored)
        found = {names.canonical(name) for name in stored}
        like = target.for_context(None).layers_like(attention[-1])
        own = {name for name in found if not names.ignored.fullmatch(name)}
        # Quantized checkpoints may have a head that is not quantized, also without saying so.
        kinds = {name.rpartition(".")[2] for name in own}
        quantization = None if kinds <= _PLAIN_TENSORS else like.quantization
        layers = _as_stored(like, names, found, tied=False, quantization=quantization)
        return cls.of_mtp(layers, names)

    @classmethod
    def of_mtp(cls, layers: ModelConfig, names: HeadNames, **fields: Any) -> EagleConfig:
        """Return the configuration of an MTP head with these layers and names of tensors."""
        return cls(
            "mtp",
            layers,
            layers.vocab_size,
            layers.hidden_size,
            norm_output=names.norm_output,
            num_wide=0,
            names=names,
            **fields,
        )

    @classmethod
    def parse(cls, kind: str, raw: Mapping[str, Any], stored: Collection[str]) -> EagleConfig:
        """Parse ``config.json`` of a head of this kind.

        ``stored`` are the names of the tensors in its file.

        Raises:
            ConfigError: a key is unknown or has an invalid value, or this is another kind of head.
        """
        config = cls._parse_layout(kind, raw, stored)
        if raw.get("num_centroids") is None:
            return config
        num_clusters = _size(raw, "num_centroids", 0)
        check_clusters("config.json: num_centroids", num_clusters, config.draft_vocab_size)
        num_best = _size(raw, "centroid_intermediate_top_k", 32)
        return replace(config, num_clusters=num_clusters, num_best=min(num_best, num_clusters))

    @classmethod
    def _parse_layout(
        cls, kind: str, raw: Mapping[str, Any], stored: Collection[str]
    ) -> EagleConfig:
        """Parse all of ``config.json`` but the sizes of a two-stage head."""
        found = raw.get("speculators_model_type")
        if found is not None and found != kind:
            msg = f"config.json: speculators_model_type: expected {kind}, found {found!r:.80}"
            raise ConfigError(msg)
        if kind == "mtp":
            return _parse_mtp(raw, stored)
        names = {EAGLE_NAMES.canonical(name) for name in stored}
        if found is not None:
            ids = raw.get("eagle_aux_hidden_state_layer_ids")
            return _eagle(raw, _speculators_decoder(raw), names, ids, verifier=_verifier(raw))
        architectures = raw.get("architectures") or []
        if architectures == ["Qwen3Eagle3Model"]:
            return _parse_deepspec(raw, names)
        listed = architectures if isinstance(architectures, list) else []
        if not any("eagle3" in str(name).lower() for name in listed):
            msg = (
                "config.json: architectures: expected that of an EAGLE-3 head, found "
                f"{architectures!r:.80}"
            )
            raise ConfigError(msg)
        return _parse_eagle(raw, names)

    def document(self, speculative_tokens: int) -> dict[str, Any]:
        """Return ``config.json`` in the layout speculators.

        ``speculative_tokens`` is the recommended number of draft tokens, for other engines.
        """
        proposal = {"proposal_type": "greedy", "speculative_tokens": speculative_tokens}
        proposal |= {"verifier_accept_k": 1, "accept_tolerance": 0.0}
        document: dict[str, Any] = {
            "architectures": ["Eagle3DraftModel" if self.kind == "eagle3" else "MTPDraftModel"],
            "speculators_model_type": self.kind,
            "speculators_config": {
                "algorithm": self.kind,
                "default_proposal_method": "greedy",
                "proposal_methods": [proposal],
                "verifier": {"name_or_path": self.verifier, "architectures": []},
            },
            "transformer_layer_config": _decoder_document(self.layers),
            "dtype": self.layers.dtype,
        }
        if self.kind == "mtp":
            document["num_nextn_predict_layers"] = 1
        else:
            document |= {
                "draft_vocab_size": self.draft_vocab_size,
                "target_hidden_size": self.target_hidden_size,
            }
            document["eagle_aux_hidden_state_layer_ids"] = (
                None if self.sources is None else list(self.sources)
            )
            document |= {flag: getattr(self, flag) for flag in _FLAGS}
        if self.fingerprint is not None:
            document["pronk"] = {"target": asdict(self.fingerprint)}
        return document


def _speculators_decoder(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    _check_keys(raw, _SPECULATORS_KEYS)
    nested = _object(raw, "transformer_layer_config")
    _check_keys(nested, _DECODER_KEYS, "transformer_layer_config.")
    return {"dtype": raw.get("dtype", raw.get("torch_dtype", "float32")), **nested}


def _parse_eagle(raw: Mapping[str, Any], names: Collection[str]) -> EagleConfig:
    _check_keys(raw, _EAGLE_KEYS)
    own = _object(raw, "eagle_config") if raw.get("eagle_config") else {}
    _check_keys(
        own, {"eagle_aux_hidden_state_layer_ids", "use_aux_hidden_state", *_FLAGS}, "eagle_config."
    )
    if own.get("use_aux_hidden_state") is False:
        msg = (
            "config.json: eagle_config.use_aux_hidden_state: expected true, found false; use a "
            "head of EAGLE-3"
        )
        raise ConfigError(msg)
    flags = {flag: own[flag] for flag in _FLAGS if flag in own}
    ids = own.get("eagle_aux_hidden_state_layer_ids")
    return _eagle({**raw, **flags}, raw, names, ids, verifier=raw.get("_name_or_path"))


def _parse_deepspec(raw: Mapping[str, Any], names: Collection[str]) -> EagleConfig:
    _check_keys(raw, _DEEPSPEC_KEYS)
    ids = raw.get("target_layer_ids")
    from_one = (
        [layer + 1 if isinstance(layer, int) else layer for layer in ids]
        if isinstance(ids, list)
        else ids
    )
    return _eagle(raw, raw, names, from_one, verifier=raw.get("target_model_name_or_path"))


def _eagle(
    raw: Mapping[str, Any],
    decoder: Mapping[str, Any],
    names: Collection[str],
    ids: Any,
    *,
    verifier: Any,
) -> EagleConfig:
    """Return the configuration of an EAGLE-3 head.

    ``names`` are its tensors in the layout speculators.
    """
    layers = _decoder(decoder, names, raw.get("quantization_config"))
    sources = None
    if ids is not None:
        if not isinstance(ids, list) or not ids:
            msg = f"config.json: expected a list of the target's layers, found {ids!r:.80}"
            raise ConfigError(msg)
        where = "config.json: layers of the target"
        sources = tuple(check_integer(where, layer, 0, error=ConfigError) for layer in ids)
    flags: dict[str, Any] = {
        flag: check_flag(f"config.json: {flag}", raw.get(flag) or False, error=ConfigError)
        for flag in _FLAGS
    }
    num_wide = sum(
        f"layers.{index}.hidden_norm.weight" in names for index in range(layers.num_layers)
    )
    return EagleConfig(
        "eagle3",
        layers,
        _size(raw, "draft_vocab_size", layers.vocab_size),
        _size(raw, "target_hidden_size", layers.hidden_size),
        sources=sources,
        **flags,
        num_wide=max(1, num_wide),
        verifier=verifier if isinstance(verifier, str) and verifier else None,
        fingerprint=_fingerprint(raw),
    )


def _parse_mtp(raw: Mapping[str, Any], stored: Collection[str]) -> EagleConfig:
    names = find_mtp_names(stored)
    if names is None or not names.own:
        target = parse_config(raw)
        return EagleConfig.in_target(target, get_family(target.family).names, stored)
    found = {names.canonical(name) for name in stored}
    layers = _decoder(_speculators_decoder(raw), found, raw.get("quantization_config"))
    verifier = _verifier(raw)
    return EagleConfig.of_mtp(layers, names, verifier=verifier, fingerprint=_fingerprint(raw))


def _decoder(raw: Mapping[str, Any], found: Collection[str], quantization: Any) -> ModelConfig:
    """Parse the configuration of the head's layers; the tensors give their number and biases."""
    numbers = [match[1] for name in found if (match := _LAYER_NAME.match(name))]
    count = 1 + max(map(int, numbers), default=0)
    types = raw.get("layer_types")
    keys = {
        **raw,
        "num_hidden_layers": count,
        "layer_types": types[:count] if isinstance(types, list) else None,
    }
    keys |= {"tie_word_embeddings": False, "quantization_config": quantization}
    config = parse_config(keys).for_context(None)
    return _as_stored(config, EAGLE_NAMES, found)


def _as_stored(
    config: ModelConfig, names: HeadNames, found: Collection[str], **changes: Any
) -> ModelConfig:
    """Return the configuration of a layer with those biases and norms that the file ``found`` has.

    ``found`` are names in the layout ``speculators``. ``changes`` are values of other fields.
    """
    (query, down, out, norm) = (names.layer[name][0] for name in ("qkv", "down", "out", "q_norm"))
    return replace(
        config,
        qkv_bias=f"layers.0.{query}.bias" in found,
        out_bias=f"layers.0.{out}.bias" in found,
        mlp_bias=f"layers.0.{down}.bias" in found,
        qk_norm=f"layers.0.{norm}.weight" in found,
        **changes,
    )


def _decoder_document(config: ModelConfig) -> dict[str, Any]:
    """Return ``transformer_layer_config`` of a decoder with RMSNorm and a gated MLP."""
    rope = config.rope or RopeConfig(config.head_dim)
    if rope.kind not in ("default", "linear", "llama3"):
        msg = (
            "expected RoPE of the kinds default, linear or llama3 to write a head, "
            f"found {rope.kind}"
        )
        raise ConfigError(msg)
    scaling: dict[str, Any] = {"rope_type": rope.kind, "factor": rope.factor}
    if rope.kind == "llama3":
        scaling |= {
            "low_freq_factor": rope.low_freq_factor,
            "high_freq_factor": rope.high_freq_factor,
        }
        scaling["original_max_position_embeddings"] = rope.original
    return {
        "model_type": "qwen3" if config.qk_norm else "llama",
        **config.document_sizes(),
        "hidden_act": config.activation,
        "rms_norm_eps": config.norm_eps,
        # With linear scaling, this key is the context length before scaling.
        "max_position_embeddings": rope.original if rope.kind == "linear" else config.context,
        "rope_theta": rope.theta,
        "rope_scaling": None if rope.kind == "default" else scaling,
        "attention_bias": config.qkv_bias,
        "mlp_bias": config.mlp_bias,
    }


def _check_keys(raw: Mapping[str, Any], known: Collection[str], where: str = "") -> None:
    unknown = sorted(set(raw) - set(known))
    if unknown:
        value = raw[unknown[0]]
        msg = (
            f"config.json: {where}{unknown[0]}: expected no such key, found {value!r:.80}; use a "
            "head without it"
        )
        raise ConfigError(msg)


def _object(raw: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = raw.get(key)
    if not isinstance(value, Mapping):
        msg = f"config.json: {key}: expected an object, found {value!r:.80}"
        raise ConfigError(msg)
    return value


def check_clusters(name: str, num_clusters: int, num_tokens: int) -> None:
    """Refuse a number of clusters, called ``name``, that does not divide the number of tokens.

    Raises:
        ConfigError: some clusters would have more tokens than others.
    """
    if num_tokens % num_clusters:
        expected = f"expected a divisor of the {num_tokens} tokens of the head"
        msg = f"{name}: {expected}, found {num_clusters}"
        raise ConfigError(msg)


def _size(raw: Mapping[str, Any], key: str, default: int) -> int:
    value = raw.get(key)
    return (
        default
        if value is None
        else check_integer(f"config.json: {key}", value, 1, error=ConfigError)
    )


def _verifier(raw: Mapping[str, Any]) -> str | None:
    """Return the name of the target in a file of the layout speculators."""
    verifier = _object(raw, "speculators_config").get("verifier")
    name = verifier.get("name_or_path") if isinstance(verifier, Mapping) else None
    return name if isinstance(name, str) and name else None


def _fingerprint(raw: Mapping[str, Any]) -> Fingerprint | None:
    if raw.get("pronk") is None:
        return None
    target = _object(raw, "pronk").get("target")
    if not isinstance(target, Mapping) or {*target} != {"architecture", "weights"}:
        msg = (
            f"config.json: pronk.target: expected architecture and weights, found {target!r:.80}; "
            "train it again"
        )
        raise ConfigError(msg)
    return Fingerprint(str(target["architecture"]), str(target["weights"]))
