"""The target in training: it writes text, provides distributions, and verifies draft tokens.

The target is loaded twice. The engine has the weights in the form of the kernels, and writes text.
A module of torch has a second copy, dequantized, and computes the distributions for the loss. For
EAGLE-3 and MTP heads, the engine computes the features with the weights as they are served
(:mod:`pronk.train.target_states`).
"""

from __future__ import annotations

import hashlib
from functools import cached_property
from pathlib import Path

from torch import Tensor

from pronk import LLM
from pronk.base.convert import torch_dtype
from pronk.checkpoint import Fingerprint, is_gguf, parse_dtype, resolve_model, tiny_model
from pronk.train.corpus.encoder import Encoder
from pronk.train.loop import find_device, set_all_threads
from pronk.train.modules.decoder import DecoderModule, load_module

_BATCH = 32  # maximum number of requests in one forward pass


class Teacher:
    """A frozen target, which a drafter learns from.

    Attributes:
        llm: the engine with the target; plain decoding.
        folder: folder of the checkpoint, or GGUF file.
        name: the model's name on the Hub, or the name of its folder.
        device: device of the second copy of the weights.
        encoder: converter of the training text to the target's tokens.
        dtype: data type in which the target's distributions are computed: the checkpoint's.
    """

    def __init__(
        self, model: str | Path | None, device: str = "cpu", threads: int | None = None
    ) -> None:
        """Load the target into the engine.

        Args:
            model: a folder or a name on the Hub; ``None`` is ``pronk-tiny`` in a clone of the
                repository.
            device: device of the second copy of the weights, which is dequantized. The engine
                computes a GGUF file on the processor all the same, as when the file is served. With
                several processes, ``cuda`` is this process's own GPU.
            threads: number of threads of torch and of the kernels; ``None`` keeps torch's number.

        Raises:
            OptionError: ``model`` is ``None``, and there is no clone.
        """
        path = tiny_model("--target") if model is None else resolve_model(model)
        is_hub_name = model is not None and not Path(model).expanduser().exists()
        self.device = find_device(device)
        set_all_threads(threads)
        deployed = "cpu" if is_gguf(path) else str(self.device)
        self.llm = LLM(
            path, drafter="autoregressive", device=deployed, max_batch=_BATCH, budget="all"
        )
        self.folder = self.llm.path
        self.name = str(model) if is_hub_name else self.folder.resolve().name
        self.encoder = Encoder.of_target(self.llm.tokenizer, self.llm.config)
        self.dtype = torch_dtype(parse_dtype("auto", self.llm.config))

    @cached_property
    def decoder(self) -> DecoderModule:
        """The second copy of the weights, as a frozen module of torch."""
        return load_module(self.folder, self.llm.config, self.dtype, self.device)

    @cached_property
    def fingerprint(self) -> Fingerprint:
        """Identity of the target, which the files of its drafters store."""
        return Fingerprint.of(self.folder)

    @property
    def unembedding(self) -> Tensor:
        """Weight of the LM head, ``[vocab, hidden]``."""
        return self.decoder.head.get_parameter("weight").detach()

    @cached_property
    def fingerprints(self) -> dict[str, str]:
        """Hashes of the ``tokenizer`` and of the ``weights``, which a resumed run compares.

        The hash of the weights covers ``config.json`` and all weights, or a GGUF file; a
        :class:`Fingerprint` covers only samples of the weights.
        """
        weights = hashlib.sha256()
        folder = self.folder
        files = [folder]
        if not is_gguf(folder):
            files = [folder / "config.json", *sorted(folder.glob("*.safetensors"))]
        for file in files:
            with file.open("rb") as content:
                weights.update(hashlib.file_digest(content, "sha256").digest())
        return {"tokenizer": self.llm.tokenizer.fingerprint, "weights": weights.hexdigest()}
