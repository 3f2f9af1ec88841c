"""Low-rank adapters (LoRA, Hu et al. 2021) of a loaded model; a request uses one or none.

A linear layer with adapters computes ``x Wᵀ + scale (x Aᵀ) Bᵀ + b`` for the rows of a request with
an adapter, in float32. The adapters are not merged into the weights, so that requests with
different adapters share a forward pass. A merged checkpoint instead rounds ``W + scale B A`` to its
data type: in float32 its logits agree within 1e-4, and texts of a merged bfloat16 checkpoint may
differ. Rows without an adapter have the bits of the model without adapters.

A folder of PEFT has ``adapter_config.json`` and ``adapter_model.safetensors``. For each adapted
module of the model, such as ``model.layers.0.self_attn.q_proj``, the latter has two tensors with
the prefix ``base_model.model.``::

    lora_A.weight  [r, inputs]
    lora_B.weight  [outputs, r]

``scale`` is ``lora_alpha / r``, or ``lora_alpha / √r`` with ``use_rslora``. The modules have the
names of transformers, also if the model itself is a GGUF file.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from pronk.base.arrays import FLOAT32, Array
from pronk.base.checks import refuse_choice
from pronk.base.errors import OptionError, refuse
from pronk.base.files.regular import is_file
from pronk.checkpoint.config import ModelConfig
from pronk.checkpoint.rows import HeadRows
from pronk.checkpoint.tensors import Checkpoint, read_json
from pronk.kernels.adapters import LowRank, pack_adapter
from pronk.models.families import get_family
from pronk.models.family import TensorNames
from pronk.models.tensor_plan import plan_tensors

if TYPE_CHECKING:
    from pronk.models.decoder import Decoder

_CONFIG = "adapter_config.json"
_WEIGHTS = "adapter_model.safetensors"
_PREFIX = "base_model.model."
# Linear layers that cannot have adapters: routers, whose weights are exact, and the products for
# each head of latent attention.
_WITHOUT_ADAPTERS = ("router", "k_b", "v_b")
# Keys of ``adapter_config.json`` with their supported values. Any other value changes the model in
# a way that is not supported, and is refused.
_EXPECTED: dict[str, tuple[object, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none", None),
    "lora_bias": (False, None),
    "use_dora": (False, None),
    "use_qalora": (False, None),
    "use_bdlora": (False, None),
    "alora_invocation_tokens": (None,),
    "arrow_config": (None,),
    "kasa_config": (None,),
    "monteclora_config": (None,),
    "velora_config": (None,),
    "layer_replication": (None,),
    "modules_to_save": (None, []),
    "target_parameters": (None, []),
    "trainable_token_indices": (None, [], {}),
}
# Values of ``init_lora_weights`` with which PEFT also changes the weights of the base model. Such
# an adapter does not fit the base model's own weights.
_CHANGED_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
# Keys of ``rank_pattern`` and ``alpha_pattern`` are regular expressions. Only those without
# repetition are accepted, because they match in linear time.
_PATTERN = re.compile(r"[\w.\\^$-]+")


class AdapterModule(NamedTuple):
    """Matrices of an adapter for one linear module: ``(x downᵀ) upᵀ`` is added to its outputs."""

    target: str  # attribute path of the linear layer in the decoder, such as ``layers.0.qkv``
    start: int  # index of the first output in ``target`` to which the product is added
    down: Array  # float32 ``[rank, inputs]``
    up: Array  # float32 ``[outputs, rank]``, already multiplied by the adapter's scale


class _Place(NamedTuple):
    """Place of some outputs of a module of transformers in the decoder, and the module's sizes."""

    target: str
    start: int
    rows: HeadRows | None  # the outputs; ``None``: all, in order
    outputs: int
    inputs: int
    factor: float  # by which the module's weight was multiplied when it was loaded


def read_adapter(folder: Path, config: ModelConfig) -> tuple[list[AdapterModule], bytes]:
    """Return the modules of an adapter for a model, and a digest of the adapter's files.

    A folder that is no adapter of this model, or has parts that are not supported, raises a
    CheckpointError.
    """
    options = _read_config(folder)
    weights = folder / _WEIGHTS
    if not is_file(weights):
        pickles = [path.name for pattern in ("*.bin", "*.pt") for path in folder.glob(pattern)]
        found = "no such file"
        if pickles:
            found = f"{pickles[0]}; pickle files can run code and are not loaded"
        refuse(folder, f"expected {_WEIGHTS}, found {found}; save the adapter with safetensors")
    checkpoint = Checkpoint(folder, files=[weights])
    if config.hides_factors:
        found = f"a GGUF file of {config.family}, whose weights have factors that it does not state"
        refuse(folder, f"expected a model in a folder, found {found}; use the model's folder")
    names = get_family(config.family).names
    places = _places(config, names)
    pairs = _pairs(folder, checkpoint)
    # Leave out tensors of image encoders, as in the model's own checkpoint.
    pairs = {
        name: pair
        for name, pair in pairs.items()
        if not names.ignored.fullmatch(_canonical(names, name))
    }
    _check_modules(folder, options, {_canonical(names, name) for name in pairs}, places)
    modules = []
    for name, (down, up) in sorted(pairs.items()):
        own_places = places[_canonical(names, name)]
        outputs = own_places[0].outputs
        inputs = own_places[0].inputs
        rank = _pattern_value(options, "rank_pattern", name, options["r"])
        alpha = _pattern_value(options, "alpha_pattern", name, options["lora_alpha"])
        for tensor, shape in ((down, (rank, inputs)), (up, (outputs, rank))):
            stored = checkpoint.shape(tensor)
            if stored != shape:
                problem = f"expected the shape {list(shape)}, found {list(stored)}"
                refuse(folder, f"tensor {tensor}: {problem}; use an adapter of this model")
        scale = alpha / (math.sqrt(rank) if options.get("use_rslora") else rank)
        first = _read(checkpoint, down)
        second = _read(checkpoint, up) * np.float32(scale)
        for place in own_places:
            taken = second if place.rows is None else second[place.rows.order(outputs)]
            scaled = taken if place.factor == 1.0 else taken * np.float32(place.factor)
            modules.append(AdapterModule(place.target, place.start, first, scaled))
    checkpoint.release()
    digest = sha256()
    for path in (folder / _CONFIG, weights):
        digest.update(sha256(path.read_bytes()).digest())
    return modules, digest.digest()


def _canonical(names: TensorNames, module: str) -> str:
    """Return the name of a module without the prefix of the family, or that of transformers.

    They differ for Nemotron-H: ``backbone.`` and ``model.``.
    """
    return names.canonical(module).removeprefix("model.")


def _check_ranks(folder: Path, options: dict[str, Any]) -> None:
    for key, patterns, kinds in (
        ("r", "rank_pattern", int),
        ("lora_alpha", "alpha_pattern", int | float),
    ):
        found = options.get(patterns) or {}
        if not isinstance(found, dict):
            refuse(
                folder,
                f"{patterns}: expected an object, found {found!r:.80}; "
                "restore the file from its source",
            )
        for value in (options.get(key), *found.values()):
            if not isinstance(value, kinds) or isinstance(value, bool) or not 0 < value < math.inf:
                refuse(
                    folder,
                    f"{key}: expected a number above 0, found {value!r:.80}; "
                    "restore the file from its source",
                )
        for pattern in found:
            if not _PATTERN.fullmatch(pattern):
                refuse(
                    folder,
                    f"rank_pattern: expected names of modules, found {pattern!r:.80}; "
                    "write out the names",
                )


def _read_config(folder: Path) -> dict[str, Any]:
    if not is_file(folder / _CONFIG):
        refuse(
            folder,
            f"expected a folder with {_CONFIG}, found none; give the folder of a PEFT adapter",
        )
    options = read_json(folder / _CONFIG)
    for key, expected in _EXPECTED.items():
        if options.get(key) not in expected:
            refuse(
                folder,
                f"{key}: expected {expected[0]!r}, found {options.get(key)!r:.80}; "
                "merge it into the model",
            )
    start = options.get("init_lora_weights")
    if isinstance(start, str) and start.startswith(_CHANGED_BASE):
        refuse(
            folder,
            f"init_lora_weights: expected an unchanged base model, found {start!r:.80}; "
            "convert the adapter",
        )
    _check_ranks(folder, options)
    return options


def _places(config: ModelConfig, names: TensorNames) -> dict[str, list[_Place]]:
    """Return where adapters can be, by names of transformers' modules without their prefix."""
    places: dict[str, list[_Place]] = {}
    for part in plan_tensors(config, names):
        module = part.target.split(".")[2:]
        if part.kind != "linear" or len(module) != 1 or module[0] in _WITHOUT_ADAPTERS:
            continue  # an embedding, a norm, the LM head, an expert, or products of another kind
        if _has_tiled_heads(config, int(part.target.split(".")[1]), module[0]):
            continue
        start = 0
        for tensor in part.weight:
            shape = tensor.shape[::-1] if part.transposed else tensor.shape
            part_shape = tensor.part_shape[::-1] if part.transposed else tensor.part_shape
            name = names.module_name(tensor.name.removesuffix(".weight"))
            place = _Place(part.target, start, tensor.rows, shape[0], shape[1], tensor.factor)
            places.setdefault(name, []).append(place)
            start += part_shape[0]
    return places


def _has_tiled_heads(config: ModelConfig, layer: int, module: str) -> bool:
    """Return whether a GGUF file has the heads of a projection in another order than adapters."""
    recurrent = config.recurrent_of(layer)
    is_tiled = recurrent is not None and recurrent.tiled_heads
    return is_tiled and module in {"mixer_in", "mixer_gates", "mixer_out"}


def _pairs(folder: Path, checkpoint: Checkpoint) -> dict[str, tuple[str, str]]:
    """Return the names of each module's tensors ``lora_A`` and ``lora_B``, by the module's name."""
    ends = (".lora_A.weight", ".lora_B.weight")
    for tensor in checkpoint:
        if not (tensor.startswith(_PREFIX) and tensor.endswith(ends)):
            found = "found a tensor that is not supported; merge the adapter into the model"
            refuse(
                folder,
                f"tensor {tensor}: expected {_PREFIX}….lora_A.weight or lora_B.weight, {found}",
            )
    modules = sorted({tensor[: -len(ends[0])] for tensor in checkpoint})
    present = set(checkpoint)
    missing = [module + end for module in modules for end in ends if module + end not in present]
    if missing:
        refuse(folder, f"expected tensor {missing[0]}, found none; download the adapter again")
    if not modules:
        refuse(folder, "expected tensors lora_A and lora_B, found none; download the adapter again")
    return {
        module.removeprefix(_PREFIX): (module + ends[0], module + ends[1]) for module in modules
    }


def _check_modules(
    folder: Path, options: Mapping[str, Any], found: set[str], places: Mapping[str, list[_Place]]
) -> None:
    """Raise a CheckpointError if the adapter and the model have not the same modules.

    Either the adapter has tensors of a module that the model lacks, or tensors are missing of a
    module that ``target_modules`` names.
    """
    unknown = sorted(found - places.keys())
    if unknown:
        expected = (
            "expected adapted linear layers of this model (no experts, router, "
            "embedding or LM head, nor kv_b_proj, nor recurrent layers of a GGUF file)"
        )
        refuse(folder, f"{expected}, found {unknown[0]}; use an adapter of this model without it")
    if options.get("layers_to_transform") is not None or options.get("exclude_modules"):
        # such an adapter need not have tensors of every module that target_modules names
        return
    missing = [
        name
        for name in places
        if name not in found and _is_target(options.get("target_modules"), name)
    ]
    if missing:
        refuse(
            folder,
            f"expected tensors of {missing[0]}, which target_modules names, found none; "
            "download it again",
        )


def _is_target(targets: object, name: str) -> bool:
    """Return whether ``target_modules``, the value ``targets``, names a module.

    A regular expression counts as naming none, because it is not evaluated.
    """
    if isinstance(targets, str):
        return targets == "all-linear"
    return isinstance(targets, list) and any(
        name == each or name.endswith(f".{each}") for each in targets
    )


def _pattern_value(options: Mapping[str, Any], key: str, name: str, default: Any) -> Any:
    """Return the value in ``options[key]`` of the first pattern that matches the end of ``name``.

    ``key`` is ``rank_pattern`` or ``alpha_pattern``, and ``name`` is that of a module. Patterns
    match as in PEFT. If none does, the result is ``default``.
    """
    for pattern, value in (options.get(key) or {}).items():
        if re.match(rf"(.*\.)?({pattern})$", name):
            return value
    return default


def _read(checkpoint: Checkpoint, tensor: str) -> Array:
    """Return an adapter's tensor as float32; raise a CheckpointError if a number is not finite."""
    checkpoint.check_dtype(tensor)
    values = checkpoint.tensor(tensor).astype(FLOAT32)
    if not np.isfinite(values).all():
        refuse(
            checkpoint.folder,
            f"tensor {tensor}: expected finite numbers, found others; use another adapter",
        )
    return values


class Adapter(NamedTuple):
    """An adapter of a loaded model, which a request selects by name."""

    name: str
    number: int  # index of this adapter in ``Linear.adapters``
    digest: bytes  # hash of the adapter's files; part of the keys of its blocks in the prefix cache


def cache_salt(adapter: Adapter | None, salt: bytes = b"") -> bytes:
    """Return a salt for the keys of the prefix cache: ``salt``, mixed with the adapter's digest.

    Keys and values depend on the adapter, so requests with different adapters share no blocks.
    """
    return salt if adapter is None else sha256(adapter.digest + salt).digest()


class Adapters(dict[str, Adapter]):
    """The adapters of one model, by name.

    Raises:
        OptionError: a name is empty, ``adapters`` is no mapping, or several processes compute the
            model.
        CheckpointError: a folder has no adapter of this model; see
            :func:`~pronk.models.adapters.read_adapter`.
    """

    def __init__(
        self, folders: Mapping[str, str | Path] | None, config: ModelConfig, workers: int = 1
    ) -> None:
        """Read the adapters in ``folders``, by name; :meth:`attach` adds them to the model.

        ``config`` is that of the model, and ``workers`` the number of processes that compute it;
        more than one cannot have adapters.
        """
        if folders and workers > 1:
            msg = (
                f"adapters: expected one process (workers=1), found workers={workers}; leave one "
                "of the options out"
            )
            raise OptionError(msg)
        super().__init__()
        folders = {} if folders is None else folders
        if not isinstance(folders, Mapping) or not all(
            isinstance(name, str) and name for name in folders
        ):
            refuse("adapters", f"expected folders by name, found {folders!r:.80}", OptionError)
        self._modules: list[list[AdapterModule]] = []
        for name, folder in folders.items():
            modules, digest = read_adapter(Path(folder).expanduser(), config)
            self[name] = Adapter(name, len(self._modules), digest)
            self._modules.append(modules)

    def find(self, name: str | None) -> Adapter | None:
        """Return the adapter called ``name``; ``None`` if ``name`` is ``None``.

        Raise an OptionError if the model has no adapter of this name.
        """
        if name is None:
            return None
        if name not in self:
            if not self:
                refuse(
                    "adapter",
                    f"expected none, because the model has no adapters, found {name!r:.80}",
                    OptionError,
                )
            refuse_choice("adapter", name, self)
        return self[name]

    def attach(self, decoder: Decoder) -> None:
        """Add the adapters to the linear layers of a model, before its first forward pass."""
        for number, modules in enumerate(self._modules):
            by_target: dict[str, list[AdapterModule]] = {}
            for module in modules:
                by_target.setdefault(module.target, []).append(module)
            for target, found in by_target.items():
                start = 0
                # a layer such as qkv may consist of several matrices
                for linear in decoder.get(target).parts:
                    stop = start + linear.out_features
                    slices = [_slice(each, start, stop) for each in found]
                    parts = [part for part in slices if part is not None]
                    if parts:
                        linear.adapters = linear.adapters or [None] * len(self._modules)
                        linear.adapters[number] = pack_adapter(linear.packed, parts)
                    start = stop
        self._modules = []


def _slice(module: AdapterModule, start: int, stop: int) -> LowRank | None:
    """Return the part of a module that changes the outputs ``start .. stop - 1`` of its layer.

    The result is ``None`` if the module changes none of these outputs.
    """
    first = max(module.start, start)
    end = min(module.start + len(module.up), stop)
    if first >= end:
        return None
    return LowRank(first - start, module.down, module.up[first - module.start : end - module.start])
