"""Options of a model: what is loaded, and what computes it."""

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Annotated

from pronk.base.options import Option, documented

# How weights are stored in memory: as in the checkpoint, or quantized to 8 or 4 bits at loading.
WEIGHTS = ("plain", "int8", "int4")
# How products of 16-bit weights round, see :mod:`pronk.models.choice`.
BITS_CHOICES = ("auto", "portable", "fast")
# What several processes divide: the branches of token trees, or the heads and columns of layers.
PARALLEL = ("tree", "tensor")


@documented
@dataclass(frozen=True)
class ModelOptions:
    """Options of a model."""

    model: Annotated[
        str | Path | None,
        Option(
            "Name as in pronk pull (smollm2, owner/name, owner/name:Q4_K_M), folder with a "
            "checkpoint, or GGUF file.",
            absent="smollm2",
            details="Names are those of :mod:`pronk.checkpoint.hub.names`.",
        ),
    ] = None
    _: KW_ONLY
    adapters: Annotated[
        Mapping[str, str | Path] | None,
        Option(
            "LoRA adapters in folders of PEFT, by name.",
            details=(
                "Calls choose one with ``adapter``; rows of other requests keep their bits "
                "(:mod:`pronk.models.adapters`)."
            ),
        ),
    ] = None
    device: Annotated[
        str,
        Option(
            "Device that the model runs on: cpu, cuda (an NVIDIA GPU; experimental), or one that "
            "an installed package adds.",
            details="The extra ``gpu`` is for cuda. Packages add devices by entry points "
            "(:mod:`pronk.base.guests`).",
        ),
    ] = "cpu"
    dtype: Annotated[
        str,
        Option(
            "Data type: auto (that of the checkpoint), float32, bfloat16 or float16.",
            choices=("auto", "float32", "bfloat16", "float16"),
        ),
    ] = "auto"
    weights: Annotated[
        str,
        Option(
            "plain: as stored in the checkpoint. int8, int4: quantized while loading, "
            "smaller and faster.",
            choices=WEIGHTS,
            details="Quantized, the output changes; the LM head always has 8 bits.",
        ),
    ] = "plain"
    weight_cache: Annotated[
        bool | str | Path,
        Option(
            "Keep the packed weights of a GGUF file, for faster starts, in ~/.cache/pronk/weights "
            "or in this folder. Their file is as large as the model's.",
            details="Later loads map it, without packing, and share the memory.",
        ),
    ] = False
    weight_cache_size: Annotated[
        str | int | None,
        Option(
            "Maximum size of the folder of packed weights; beyond, those of the least recently "
            "used models are deleted.",
            absent="16GiB",
        ),
    ] = None
    context: Annotated[
        int | None,
        Option(
            "Maximum number of tokens of a text, prompt and output. It selects the rotations of "
            "models with longrope, such as Phi-4-mini.",
            low=1,
            absent="that of the model",
        ),
    ] = None
    threads: Annotated[
        int | None,
        Option(
            "Number of threads to compute with, per process.",
            low=1,
            high=4096,
            absent="number of cores",
            details="The workers share the cores.",
        ),
    ] = None
    workers: Annotated[
        int,
        Option(
            "Number of processes that compute the model together, started by pronk or by torchrun.",
            low=1,
            high=64,
            details=(
                "They share this machine's cores, and end with :meth:`close` or the deletion of "
                "the object. Under ``torchrun``, in all processes but the first, the constructor "
                "serves the first one and then exits."
            ),
        ),
    ] = 1
    parallel: Annotated[
        str,
        Option(
            "Split of the work among workers. tree: branches of the draft tree. tensor: heads and "
            "columns of the model.",
            choices=PARALLEL,
            details=(
                '``"tree"`` gives each worker a copy of the model and is used when it is faster; '
                'the text is the same. With ``"tensor"``, the text depends on the number of '
                "workers, but not on the drafter."
            ),
        ),
    ] = "tree"
    kernels: Annotated[
        str,
        Option(
            "CPU kernels. auto: the fastest that this processor supports; or amx, avx512_bf16, "
            "avx512, avx2 or portable.",
        ),
    ] = "auto"
    bits: Annotated[
        str,
        Option(
            "portable: the same bits on every processor. fast: products of 16-bit weights use the "
            "bfloat16 instructions of the processor, if it has them. auto: fast for bfloat16 "
            "weights of which none are quantized, otherwise portable.",
            choices=BITS_CHOICES,
            details="The attribute ``bits`` of :class:`pronk.LLM` has the result.",
        ),
    ] = "auto"
