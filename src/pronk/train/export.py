"""Export of trained models, and reading of checkpoints to train further (``lm --init``).

transformers loads the exported checkpoints as ``LlamaForCausalLM``; drafters are read by
:mod:`pronk.lab.drafters.modules.files`. Weights are bfloat16. The output folder is replaced
atomically.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn

from pronk import OptionError
from pronk.base import (
    TOKENIZER_FILES,
    convert_write_errors,
    copy_companions,
    replace_folder,
    write_json,
    write_text,
)
from pronk.base.convert import to_tensor
from pronk.checkpoint import (
    Checkpoint,
    Fingerprint,
    ModelConfig,
    get_family,
    is_gguf,
    parse_config,
    plan_tensors,
    read_config,
    resolve_model,
)
from pronk.lab import HeadsShape, TrainedDrafter
from pronk.text import Tokenizer
from pronk.train.corpus.encoder import Encoder
from pronk.train.modules.decoder import DecoderModule, load_module
from pronk.train.modules.drafters import HeadsModule
from pronk.train.options import ModelShape

# Fields of a configuration that do not change what the model computes: names, ids of special
# tokens, and how weights are stored. An export may change them.
_NOT_COMPUTED = {"family", "bos_id", "eos_ids", "dtype", "quantization"}


def export_model(
    decoder: DecoderModule,
    tokenizer_of: Path,
    folder: Path,
    card: str,
    documents: Mapping[str, Mapping[str, Any]] | None = None,
) -> None:
    """Write a language model as a checkpoint in the Hugging Face layout.

    Args:
        decoder: a Llama with weights that are not quantized.
        tokenizer_of: folder or GGUF file with the tokenizer.
        folder: folder to write; its contents are replaced.
        card: content of ``README.md``.
        documents: contents of further JSON files, by file name.
    """
    config = hugging_face_config(decoder.config)
    special = {key: config[key] for key in ("bos_token_id", "eos_token_id")}
    files = {
        "config.json": config,
        "generation_config.json": {**special, "do_sample": False},
        **(documents or {}),
    }
    export_tensors(folder, hugging_face_tensors(decoder), files, card, tokenizer_of)


def export_drafter(folder: Path, module: nn.Module, document: Mapping[str, Any], card: str) -> None:
    """Write a trained drafter; the contents of ``folder`` are replaced.

    The files are the weights of ``module``, ``document`` as ``drafter.json``, and ``card`` as
    ``README.md``.
    """
    export_tensors(folder, module.state_dict(), {"drafter.json": document}, card)


def export_tensors(
    folder: Path,
    tensors: Mapping[str, Tensor],
    files: Mapping[str, Mapping[str, Any]],
    card: str,
    tokenizer_of: Path | None = None,
) -> None:
    """Write a model; the contents of ``folder`` are replaced.

    Args:
        folder: folder to write.
        tensors: tensors by name; floating-point numbers are stored in bfloat16.
        files: contents of JSON files, by file name.
        card: content of ``README.md``.
        tokenizer_of: folder or GGUF file whose tokenizer is written, too; ``None``: no tokenizer.
    """
    stored: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        dtype = torch.bfloat16 if tensor.is_floating_point() else None
        stored[name] = tensor.detach().to("cpu", dtype).contiguous()
    with (
        convert_write_errors(folder, "the model", SafetensorError),
        replace_folder(folder) as partial,
    ):
        save_file(stored, partial / "model.safetensors", metadata={"format": "pt"})
        if tokenizer_of is not None and is_gguf(tokenizer_of):
            Tokenizer.load(tokenizer_of).save(partial)
        elif tokenizer_of is not None:
            copy_companions(tokenizer_of, partial, TOKENIZER_FILES)
        for name, document in files.items():
            write_json(partial / name, document, indent=2)
        write_text(partial / "README.md", card)


def hugging_face_tensors(decoder: DecoderModule) -> dict[str, Tensor]:
    """Return the weights by their names in transformers; fused matrices such as qkv are split."""
    names = get_family("llama").names
    tensors = dict[str, Tensor]()
    for part in plan_tensors(decoder.config, names):
        if not part.weight:  # a tied LM head has no weight of its own
            continue
        name = part.target if part.kind == "table" else f"{part.target}.weight"
        weight = decoder.get_parameter(name)
        pieces = weight.split([stored.shape[0] for stored in part.weight])
        prefix = "" if part.target == "head" else names.prefix
        for stored, piece in zip(part.weight, pieces, strict=True):
            tensors[f"{prefix}{stored.name}"] = piece
    return tensors


def hugging_face_config(config: ModelConfig) -> dict[str, Any]:
    """Return the content of ``config.json`` for a Llama with the sizes of ``config``."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **config.document_sizes(),
        "max_position_embeddings": config.context,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": 10000.0 if config.rope is None else config.rope.theta,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": config.tied,
        "bos_token_id": config.bos_id,
        "eos_token_id": list(config.eos_ids),
        "initializer_range": 0.02,
        "use_cache": True,
        "torch_dtype": "bfloat16",
    }


@dataclass(frozen=True, eq=False)
class InitialModel:
    """A checkpoint that ``pronk train lm --init`` trains further.

    A model that predicts ``n`` tokens at once can be trained further to predict ``n'`` tokens
    (Gloeckle et al. 2024, section 3.6). The first ``n' - 1`` heads in the checkpoint's folder
    ``heads`` are used. If it has fewer, heads are added: a new head has new layers, the final norm
    and, if heads have unembeddings of their own, a copy of the model's unembedding. With ``n' =
    1``, no heads are used.
    """

    name: str  # the model, as the user wrote it
    folder: Path
    config: ModelConfig
    tokenizer: Tokenizer
    fingerprint: Fingerprint
    # shape of the heads in addition to the model's own; ``None`` without any
    heads: HeadsShape | None

    @classmethod
    def read(cls, name: str) -> InitialModel:
        """Read the configuration, but not the weights, of the model ``name``.

        ``name`` is a folder, a GGUF file, or a name as in ``pronk pull``.

        Raises:
            CheckpointError: there is no such model, or its files are damaged.
            OptionError: the export cannot describe the model, or its heads are of another model.
        """
        folder = resolve_model(name)
        config = read_config(folder)
        _check_exportable(name, config)
        tokenizer = Tokenizer.load(folder, config.vocab_size)
        fingerprint = Fingerprint.of(folder)
        heads = _read_heads(folder / "heads", fingerprint)
        return cls(name, folder, config, tokenizer, fingerprint, heads)

    @property
    def shape(self) -> ModelShape:
        """Sizes of the model, as the options of a new model state them."""
        c = self.config
        return ModelShape(
            hidden=c.hidden_size,
            layers=c.num_layers,
            heads=c.num_heads,
            kv_heads=c.num_kv_heads,
            mlp=c.intermediate_size,
            vocab=c.vocab_size,
            context=c.context,
        )

    @property
    def encoder(self) -> Encoder:
        """Converter of the training text to the model's tokens."""
        return Encoder.of_target(self.tokenizer, self.config)

    @property
    def tokens(self) -> int:
        """Number of tokens that the model predicts at once."""
        return 1 if self.heads is None else 1 + self.heads.num_heads

    def heads_for(self, tokens: int) -> HeadsShape | None:
        """Return the shape of the checkpoint's heads that predict ``tokens`` tokens at once.

        ``None`` if the checkpoint has no heads, or none are needed. Raises OptionError if another
        number of heads would take other layers of the model.
        """
        if self.heads is None or tokens == 1:
            return None
        if self.heads.order == "anticausal" and tokens != self.tokens:
            msg = (
                f"future-tokens: expected {self.tokens} as in the checkpoint, or 1, since "
                f"anticausal heads are the model's last layers; found {tokens}"
            )
            raise OptionError(msg)
        return replace(self.heads, num_heads=tokens - 1)

    def weights(self) -> dict[str, Tensor]:
        """Return the decoder's weights in float32, by the names that ``DecoderModule`` has."""
        module = load_module(self.folder, self.config, torch.float32, torch.device("cpu"))
        return dict(module.state_dict())

    def load_heads(self, heads: HeadsModule) -> None:
        """Copy the checkpoint's heads into ``heads``, as many as exist in both.

        Raises:
            OptionError: the checkpoint's heads have other tensors than ``heads``.
            CheckpointError: the file of the heads cannot be read.
        """
        if self.heads is None:
            return
        kept = min(self.heads.num_heads, heads.shape.num_heads)
        stored = Checkpoint(self.folder / "heads", remedy="train it again")
        names = [name for name in stored if _head_number(name) < kept]
        tensors = {name: to_tensor(stored.tensor(name)).float() for name in names}
        expected = {name for name in heads.state_dict() if _head_number(name) < kept}
        if tensors.keys() != expected:
            odd = ", ".join(sorted(tensors.keys() ^ expected))
            msg = (
                f"init: expected the tensors of {kept} heads in {self.folder / 'heads'}, found "
                f"other ones: {odd}"
            )
            raise OptionError(msg)
        heads.load_state_dict(tensors, strict=False)


def _head_number(tensor: str) -> int:
    """Return the index (from 0) of a tensor's head: 2 for ``layers.2.mlp.weight``."""
    return int(tensor.split(".")[1])


def _check_exportable(name: str, config: ModelConfig) -> None:
    """Raise OptionError if an export cannot describe a model of this configuration.

    Exports are Llamas; ``name`` is the model's name in the message.
    """
    written = parse_config(hugging_face_config(config))
    differences: list[str] = []
    for field in fields(ModelConfig):
        if not field.compare or field.name in _NOT_COMPUTED:
            continue
        found = getattr(config, field.name)
        other = getattr(written, field.name)
        if found != other:
            differences.append(f"{field.name} {found!r} instead of {other!r}")
    if differences:
        msg = (
            f"init: expected a model of a Llama's kind, which the export can write; found {name}, "
            f"{config.family} with {', '.join(differences)}"
        )
        raise OptionError(msg)


def _read_heads(folder: Path, model: Fingerprint) -> HeadsShape | None:
    """Return the shape of the heads in a folder; ``None`` if it has none.

    Raises OptionError if the heads were trained for another model than ``model``.
    """
    if not folder.is_dir():
        return None
    stored = TrainedDrafter.read(folder)
    if stored.kind != "multi_token" or stored.target_fingerprint != model:
        msg = (
            f"init: expected heads of the model itself in {folder}, found {stored.kind} of "
            f"{stored.target_fingerprint}; remove this folder to train without them"
        )
        raise OptionError(msg)
    return stored.make_shape(HeadsShape)
