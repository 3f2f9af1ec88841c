"""Write a checkpoint as safetensors shards, one tensor at a time; copy the files beside it."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

from pronk.base.arrays import Array, DType, as_bytes
from pronk.base.errors import OptionError
from pronk.base.files.atomic import write_json
from pronk.base.quantities import size_texts
from pronk.checkpoint.tensors import DTYPES, INDEX, SINGLE
from pronk.models.tensor_plan import CheckpointTensor

TOKENIZER_FILES = (
    "tokenizer.json tokenizer_config.json special_tokens_map.json added_tokens.json "
    "tokenizer.model vocab.json "
    "merges.txt chat_template.jinja additional_chat_templates/*.jinja"
).split()
_OTHER_FILES = (
    "chat_template.json generation_config.json LICENSE LICENSE.txt LICENSE.md NOTICE".split()
)


def copy_companions(
    source: Path, folder: Path, files: Iterable[str] = (*TOKENIZER_FILES, *_OTHER_FILES)
) -> None:
    """Copy the files of a model besides its weights and config, such as tokenizer and licence.

    ``files`` are paths or patterns in ``source``; missing ones are left out.
    """
    found = [path for pattern in files for path in sorted(source.glob(pattern))]
    for path in found:
        if path.is_file():
            copy = folder / path.relative_to(source)
            copy.parent.mkdir(exist_ok=True)
            shutil.copyfile(path, copy)


# called with the number of bytes written so far, and the total
Progress = Callable[[int, int], None]

_SAFETENSORS_TYPES = {dtype: name for name, dtype in DTYPES.items()}


class ShardEntry(NamedTuple):
    """A tensor to write to a safetensors file."""

    # argument of ``build`` in :func:`write_weights`; has the shape of the result
    tensor: CheckpointTensor
    name: str  # name in the file
    dtype: DType  # data type of the result of ``build``, and in the file

    @property
    def num_bytes(self) -> int:
        """Size of the tensor in the file, in bytes."""
        return math.prod(self.tensor.shape) * self.dtype.itemsize


def write_weights(
    folder: Path,
    entries: list[ShardEntry],
    build: Callable[[CheckpointTensor], Array],
    shard_bytes: int,
    progress: Progress,
) -> None:
    """Write the tensors of ``entries`` to shards; call ``build`` for one tensor at a time.

    A shard has at most ``shard_bytes`` bytes of tensors, or a single larger tensor.
    """
    shards: list[list[ShardEntry]] = [[]]
    for entry in entries:
        num_bytes = sum(other.num_bytes for other in shards[-1])
        if shards[-1] and num_bytes + entry.num_bytes > shard_bytes:
            shards.append([])
        shards[-1].append(entry)
    written = 0
    total = sum(entry.num_bytes for entry in entries)
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        file = SINGLE if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors"
        # Largest item size first: the offset of each tensor is then a multiple of the tensor's item
        # size.
        shard.sort(key=lambda entry: -entry.dtype.itemsize)
        weight_map |= {entry.name: file for entry in shard}
        with (folder / file).open("wb") as stream:
            stream.write(_header(shard))
            for entry in shard:
                stream.write(as_bytes(build(entry.tensor)).data)
                written += entry.num_bytes
                progress(written, total)
    if len(shards) > 1:
        write_json(
            folder / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2
        )


def _header(shard: Iterable[ShardEntry]) -> bytes:
    """Return a safetensors header: 8 bytes with its length, then JSON in units of 8 bytes."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    start = 0
    for entry in shard:
        end = start + entry.num_bytes
        dtype = _SAFETENSORS_TYPES[entry.dtype]
        shape = entry.tensor.shape
        header[entry.name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
        start = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def check_output_folder(out: Path, num_bytes: int) -> None:
    """Raise ``OptionError`` unless ``out`` is new or empty and ``num_bytes`` are free there."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        msg = (
            f"out: expected a new or empty folder, found {out} in use; "
            "choose another name or remove it"
        )
        raise OptionError(msg)
    parent = next(folder for folder in out.absolute().parents if folder.is_dir())
    free = shutil.disk_usage(parent).free
    if free < num_bytes:
        needed, found = size_texts(num_bytes, free)
        msg = (
            f"out: expected {needed} of free disk space in {parent}, found {found}; make room or "
            "choose another disk"
        )
        raise OptionError(msg)
