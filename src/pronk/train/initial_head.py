"""First weights of a new head: those of a trained head for the same target."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from pronk import CheckpointError, ConfigError, OptionError
from pronk.base import locate_error
from pronk.base.convert import to_tensor
from pronk.checkpoint import Fingerprint, read_json
from pronk.drafting import EagleConfig, draft_ids_of, packaged_heads
from pronk.train.modules.eagle import EagleModule
from pronk.train.quantization.heads import find_head_kind, plain_tensors

_LM_HEAD = "lm_head.weight"
_VOCABULARY = ("d2t", "t2d")  # names of the tensors that describe the draft vocabulary


def find_initial_head(name: str) -> Path:
    """Return the folder of a head: ``name``, or that of a head of this name that comes with pronk.

    The folder may not exist.
    """
    packaged = {head.folder.name: head.folder for head in packaged_heads()}
    path = Path(name)
    return packaged[name] if name in packaged and not path.exists() else path.resolve()


class InitialHead:
    """A head that ``pronk train eagle3`` has written, quantized or not.

    Raises:
        OptionError: the folder has no head of this kind, or another program has written it.
        CheckpointError: the head is unreadable.
    """

    def __init__(self, folder: Path, kind: str) -> None:
        """Read the head in ``folder``; ``kind`` is ``eagle3`` or ``mtp``."""
        self._folder = folder
        found = find_head_kind(folder)
        if found != kind:
            msg = f"init: expected the folder of an {kind} head, found {found or 'none'}: {folder}"
            raise OptionError(msg)
        arrays = plain_tensors(folder)
        self._weights = {name: to_tensor(array) for name, array in arrays.items()}
        document = read_json(folder / "config.json", ConfigError)
        with locate_error(folder, ConfigError, ConfigError):
            self._config = EagleConfig.parse(kind, document, tuple(arrays))
        if self._config.fingerprint is None:
            msg = (
                f"init: expected a head that pronk train has written, found one of another program:"
                f" {folder}; train without --init"
            )
            raise OptionError(msg)

    @torch.no_grad()
    def copy_to(self, module: EagleModule, target: Fingerprint, num_layers: int) -> None:
        """Copy the weights to a module whose LM head has the rows of the target's.

        The draft vocabularies may differ. A token that is new gets the target's row of the LM head,
        moved by the mean difference of the trained rows from the target's.

        Args:
            module: the head to train.
            target: fingerprint of the target; the head may be one for another quantization of it.
            num_layers: number of the target's layers.

        Raises:
            OptionError: the head is one for another target, or has other sizes.
            CheckpointError: its tensors are damaged.
        """
        self._check(module.eagle, target, num_layers)
        own = module.exported()
        for name in own.keys() - {_LM_HEAD, *_VOCABULARY}:
            own[name].copy_(self._tensor(name, own[name].shape))
        if _LM_HEAD in own:
            self._copy_rows(own[_LM_HEAD], module.draft_ids)

    def _tensor(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Return a tensor of the head; raise CheckpointError unless it has this shape."""
        tensor = self._weights.get(name)
        if tensor is None or tensor.shape != shape:
            found = "none" if tensor is None else list(tensor.shape)
            msg = f"{self._folder}: tensor {name}: expected shape {list(shape)}, found {found}"
            raise CheckpointError(msg)
        return tensor

    def _check(self, config: EagleConfig, target: Fingerprint, num_layers: int) -> None:
        """Raise OptionError unless the head is one of this configuration, for this target."""
        fingerprint = self._config.fingerprint
        if fingerprint is None or fingerprint.architecture != target.architecture:
            msg = (
                f"init: expected a head for this target, found one for {self._config.verifier}: "
                f"{self._folder}; train without --init"
            )
            raise OptionError(msg)
        wanted = _settings(config, num_layers)
        found = _settings(self._config, num_layers)
        changed = [
            f"{name} = {value}, found {found[name]}"
            for name, value in wanted.items()
            if value != found[name]
        ]
        if changed:
            given = all(wanted[name] == found[name] for name in wanted.keys() - {"layers", "mlp"})
            remedy = "give the --layers and the --mlp of that head" if given else "leave --init out"
            msg = f"init: expected a head with {'; '.join(changed)}: {self._folder}; {remedy}"
            raise OptionError(msg)

    def _copy_rows(self, rows: Tensor, draft_ids: Tensor) -> None:
        """Set the rows of an LM head, given those of the target's for ``draft_ids``."""
        count = self._config.draft_vocab_size
        trained = self._tensor(_LM_HEAD, (count, rows.shape[1])).float()
        vocab_size = self._config.layers.vocab_size
        offsets = self._tensor("d2t", (count,)).numpy()
        places = torch.full((vocab_size,), -1)
        places[draft_ids_of(offsets, vocab_size, self._folder)] = torch.arange(count)
        places = places[draft_ids]
        is_known = places >= 0
        known = trained[places[is_known]]
        if len(known):
            rows += (known - rows[is_known]).mean(0)
        rows[is_known] = known


def _settings(config: EagleConfig, num_layers: int) -> Mapping[str, object]:
    """Return what two heads must have in common, by name."""
    layers = config.layers
    return {
        "layers": config.sources_of(num_layers),
        "mlp": layers.intermediate_size,
        "hidden_size": layers.hidden_size,
        "heads, KV heads, head_dim": (layers.num_heads, layers.num_kv_heads, layers.head_dim),
        "rope": layers.rope,
        "norm_eps": layers.norm_eps,
        "fc_norm": config.fc_norm,
        "norm_before_fc": config.norm_before_fc,
        "norm_before_residual": config.norm_before_residual,
        "norm_output": config.norm_output,
    }
