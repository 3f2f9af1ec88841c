"""Layouts of files with a trained head (EAGLE-3 or MTP): how a layout names the tensors.

Every layout is read by the names of the layout ``speculators``, with these additions for an MTP
head::

    token_norm   norm of the token's embedding       feature_norm   norm of a hidden state
    fc           both, concatenated, to hidden size  layers.0       an ordinary decoder layer

A head can also be a part of its target's checkpoint. Its layer then has the names that the target's
layers have (:meth:`HeadNames.with_layer_of`), and all other tensors of the target get a prefix and
are ignored. If a checkpoint has several MTP layers, the first one drafts all tokens.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from pronk.drafting.shared.two_stage_head import CLUSTER_TOKENS
from pronk.models.family import LLAMA_LAYER, TensorNames
from pronk.models.inventory import choose_alternatives

# Name of the projection of an MTP layer in a GGUF file, where the layer follows the target's.
_GGUF_PROJECTION = re.compile(r"(blk\.\d+\.)nextn\.eh_proj\.weight")
# The same in checkpoints of DeepSeek: ``model.layers.61.eh_proj.weight``.
_DEEPSEEK_PROJECTION = re.compile(r"(.*\.\d+\.)eh_proj\.weight")
_NUMBER = re.compile(r"\d+")
_OF_TARGET = "target:"  # prefix of the names of tensors that do not belong to the head


@dataclass(frozen=True)
class HeadNames(TensorNames):
    """Names of a head's tensors.

    Attributes:
        renames: maps a name in the file to the name that replaces it. A key that ends with a dot is
            the beginning of names. The first key that matches is used.
        own: whether the file has only the head; otherwise tensors without a match in ``renames``
            are the target's.
        embedding_first: whether the embedding comes before the hidden state in the input of ``fc``,
            for MTP.
        zero_first_embedding: whether the embedding of the text's second token is replaced by zeros,
            for MTP.
        norm_output: whether the next depth reads the output after the final norm, for MTP.
    """

    renames: Mapping[str, str] | None = None
    own: bool = True
    embedding_first: bool = True
    zero_first_embedding: bool = False
    norm_output: bool = True

    def canonical(self, name: str) -> str:
        """Return the name of a tensor in the layout ``speculators``."""
        for old, new in (self.renames or {}).items():
            if name == old or (old.endswith(".") and name.startswith(old)):
                return new + name[len(old) :]
        return name if self.own else _OF_TARGET + name

    def in_file(self, name: str) -> str:
        for old, new in (self.renames or {}).items():
            if name == new or (old.endswith(".") and name.startswith(new)):
                return old + name[len(new) :]
        return name

    def with_layer_of(self, family: TensorNames, stored: Collection[str]) -> HeadNames:
        """Return the layout of a head whose layer has the names of its target's layers.

        Args:
            family: names in the target's checkpoint.
            stored: names of all tensors of the checkpoint, by which alternatives are chosen.
        """
        own = [self.canonical(name) for name in stored]
        chosen = choose_alternatives(family, [name for name in own if _LAYER.match(name)])
        return replace(
            self,
            layer=chosen.layer,
            permuted_heads=chosen.permuted_heads,
            interleaved_experts=chosen.interleaved_experts,
            norm_output=self.norm_output or family.norms_drafts,
        )


_LAYER = re.compile(r"layers\.\d+\.")
_IGNORED = re.compile(rf"d2t|t2d|{re.escape(CLUSTER_TOKENS)}|{_OF_TARGET}.*|.*rotary_emb\.inv_freq")

EAGLE_NAMES = HeadNames(
    prefix="",
    layers="layers",
    layer=LLAMA_LAYER,
    embedding="embed_tokens",
    norm="norm",
    ignored=_IGNORED,
    renames={"midlayer.": "layers.0.", "model.midlayer.": "layers.0.", "model.": ""},
)


def _mtp_renames(prefix: str, *names: str) -> dict[str, str]:
    """Return the renames of the modules ``token_norm feature_norm fc norm``, below ``prefix``."""
    modules = ("token_norm.", "feature_norm.", "fc.", "norm.")
    return {f"{prefix}{name}.": module for name, module in zip(names, modules, strict=True)}


def find_mtp_names(stored: Collection[str]) -> HeadNames | None:
    """Return the layout of the MTP head among the tensors ``stored``; ``None`` if there is none.

    The names of the layer's modules are those of a Llama; see :meth:`HeadNames.with_layer_of`.
    """
    # layouts of speculators and of MiMo
    for prefix, own in (("mtp_layers.0.", True), ("model.mtp_layers.0.", False)):
        if any(name.startswith(prefix) for name in stored):
            modules = ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm")
            renames = _mtp_renames(prefix, *modules) | {prefix: "layers.0."}
            return replace(
                EAGLE_NAMES,
                own=own,
                renames=renames,
                embedding_first=own,
                zero_first_embedding=not own,
            )
    mtp = replace(EAGLE_NAMES, own=False)
    if any(name.startswith("mtp.layers.0.") for name in stored):  # layout of Qwen
        modules = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm")
        renames = _mtp_renames("mtp.", *modules) | {"mtp.layers.0.": "layers.0."}
        return replace(mtp, renames=renames)
    behind = _first_prefix(_GGUF_PROJECTION, stored)
    if behind is not None:
        # GGUF files have these names for every family, which decides about the norm of the output.
        modules = ("enorm", "hnorm", "eh_proj", "shared_head_norm")
        rest = {
            "nextn.shared_head_head.": "lm_head.",
            "nextn.embed_tokens.": "embed_tokens.",
            "": "layers.0.",
        }
        renames = _mtp_renames(f"{behind}nextn.", *modules)
        return replace(mtp, renames=renames | _below(behind, rest), norm_output=False)
    layer = _first_prefix(_DEEPSEEK_PROJECTION, stored)
    if layer is None:
        return None
    modules = ("enorm", "hnorm", "eh_proj", "shared_head.norm")
    others = {
        "shared_head.head.": "lm_head.",
        "embed_tokens.": "embed_tokens.",
        "": "layers.0.",
    }
    renames = _mtp_renames(layer, *modules) | _below(layer, others)
    return replace(mtp, renames=renames, norm_output=False)


def _first_prefix(pattern: re.Pattern[str], stored: Collection[str]) -> str | None:
    """Return the first group of ``pattern`` for the name with the smallest layer number.

    ``None`` if the pattern matches no name.
    """
    matches = [match for name in stored if (match := pattern.fullmatch(name))]
    prefixes = [match[1] for match in matches]
    return min(prefixes, key=lambda prefix: int(_NUMBER.findall(prefix)[-1]), default=None)


def _below(prefix: str, renames: Mapping[str, str]) -> dict[str, str]:
    return {prefix + old: new for old, new in renames.items()}
