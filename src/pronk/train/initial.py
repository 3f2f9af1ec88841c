"""Checkpoint from which the training of a language model starts (``pronk train lm --init``).

Gloeckle et al. 2024, section 3.6, fine-tune a model that predicts ``n`` tokens to predict ``n'`` tokens. Heads in the
checkpoint's folder ``heads`` are kept as far as ``n'`` reaches. Missing heads are added with new layers, the final norm
and, if they have unembeddings of their own, copies of the model's one. ``n' = 1`` strips the heads off.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from pathlib import Path

import torch
from torch import Tensor

from pronk.architecture.config import ModelConfig
from pronk.architecture.families import parse_config
from pronk.corpus.encoder import Encoder
from pronk.drafters.from_target.modules.files import TrainedDrafter
from pronk.drafters.from_target.modules.heads import HeadsShape
from pronk.errors import OptionError
from pronk.hub.resolve import resolve_model
from pronk.models.checkpoint import Checkpoint
from pronk.models.fingerprint import Fingerprint
from pronk.models.loader import read_config
from pronk.tokenization.tokenizer import Tokenizer
from pronk.torch_backend.convert import to_tensor
from pronk.train.export import hugging_face_config
from pronk.train.modules.heads import HeadsModule
from pronk.train.modules.load import load_module
from pronk.train.options import ModelShape

__all__ = ["InitialModel"]

# Fields of a configuration that the export may change: names, ids of special tokens, and how weights are stored.
_NOT_COMPUTED = {"family", "bos_id", "eos_ids", "dtype", "quantization"}


@dataclass(frozen=True, eq=False)
class InitialModel:
    """A checkpoint to train further; ``heads`` is the shape of its heads besides the model's own, if any."""

    name: str
    folder: Path
    config: ModelConfig
    tokenizer: Tokenizer
    fingerprint: Fingerprint
    heads: HeadsShape | None

    @classmethod
    def read(cls, name: str) -> InitialModel:
        """Read all but the weights of a folder, a GGUF file, or a model by its name as in ``pronk pull``.

        Raises:
            CheckpointError: there is no such model, or its files are damaged.
            OptionError: the export cannot describe the model, or its heads are of another model.
        """
        folder = resolve_model(name)
        config = read_config(folder)
        _check_exportable(name, config)
        tokenizer = Tokenizer.load(folder, config.vocab_size)
        fingerprint = Fingerprint.of(folder)
        return cls(name, folder, config, tokenizer, fingerprint, _read_heads(folder / "heads", fingerprint))

    @property
    def shape(self) -> ModelShape:
        """Sizes of the model."""
        c = self.config
        sizes = (c.hidden_size, c.num_layers, c.num_heads, c.num_kv_heads, c.intermediate_size, c.vocab_size, c.context)
        return ModelShape(*sizes)

    @property
    def encoder(self) -> Encoder:
        """Converter of the training text to the model's tokens."""
        return Encoder.of_target(self.tokenizer, self.config)

    @property
    def tokens(self) -> int:
        """Number of tokens that the model predicts at once."""
        return 1 if self.heads is None else 1 + self.heads.num_heads

    def heads_for(self, tokens: int) -> HeadsShape | None:
        """Return the checkpoint's heads as needed to predict ``tokens`` tokens at once.

        Raises:
            OptionError: another number of heads would move the trunk's end.
        """
        if self.heads is None or tokens == 1:
            return None
        if self.heads.order == "anticausal" and tokens != self.tokens:
            msg = (
                f"future-tokens: expected {self.tokens} as in the checkpoint, or 1, since anticausal heads are the "
                f"model's last layers; found {tokens}"
            )
            raise OptionError(msg)
        return replace(self.heads, num_heads=tokens - 1)

    def weights(self) -> dict[str, Tensor]:
        """Return the weights of the decoder by their names in ``DecoderModule``, dequantized to float32."""
        return dict(load_module(self.folder, self.config, torch.float32, torch.device("cpu")).state_dict())

    def load_heads(self, heads: HeadsModule) -> None:
        """Copy the checkpoint's heads into ``heads``, up to the smaller number of both."""
        if self.heads is None:
            return
        kept = min(self.heads.num_heads, heads.shape.num_heads)
        stored = Checkpoint(self.folder / "heads", remedy="train it again")
        tensors = {name: to_tensor(stored.tensor(name)).float() for name in stored if int(name.split(".")[1]) < kept}
        expected = {name for name in heads.state_dict() if int(name.split(".")[1]) < kept}
        if tensors.keys() != expected:
            odd = ", ".join(sorted(tensors.keys() ^ expected))
            msg = f"init: expected the tensors of {kept} heads in {self.folder / 'heads'}, found other ones: {odd}"
            raise OptionError(msg)
        heads.load_state_dict(tensors, strict=False)


def _check_exportable(name: str, config: ModelConfig) -> None:
    """Raise unless a checkpoint in the layout of the export computes the same function."""
    written = parse_config(hugging_face_config(config))
    differences = [
        f"{field.name} {getattr(config, field.name)!r} instead of {getattr(written, field.name)!r}"
        for field in fields(ModelConfig)
        if field.compare
        and field.name not in _NOT_COMPUTED
        and getattr(config, field.name) != getattr(written, field.name)
    ]
    if differences:
        msg = (
            f"init: expected a model of a Llama's kind, which the export can write; found {name}, {config.family} with "
            f"{', '.join(differences)}"
        )
        raise OptionError(msg)


def _read_heads(folder: Path, model: Fingerprint) -> HeadsShape | None:
    """Return the shape of a checkpoint's heads; ``None`` if it has none."""
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
