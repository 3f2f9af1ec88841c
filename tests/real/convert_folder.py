"""Convert a model folder with llama.cpp's own converter: ``convert_folder.py LLAMA_CPP IN OUT``.

``LLAMA_CPP`` is the source folder of llama.cpp, whose package ``conversion`` is the converter. The
file has float32 weights, and in place of the tokenizer the tokens ``t0``, ``t1``, …, because
the converter knows the tokenizers of published models only.
"""

import sys
from importlib import import_module
from pathlib import Path
from typing import Any


def set_vocab(self: Any) -> None:
    """Write a vocabulary without a tokenizer, in place of the converter's method."""
    size = self.hparams["vocab_size"]
    self.gguf_writer.add_tokenizer_model("gpt2")
    self.gguf_writer.add_tokenizer_pre("gpt-2")
    self.gguf_writer.add_token_list([f"t{number}" for number in range(size)])
    self.gguf_writer.add_token_types([1] * size)
    self.gguf_writer.add_token_merges(["t 1"])


def main() -> None:
    source, folder, path = map(Path, sys.argv[1:])
    sys.path[:0] = [str(source / "gguf-py"), str(source)]
    gguf = import_module("gguf")
    conversion = import_module("conversion")
    config = conversion.ModelBase.load_hparams(folder, False)
    name = conversion.get_model_architecture(config, conversion.ModelType.TEXT)
    converter = conversion.get_model_class(name)
    for each in converter.__mro__:
        if "set_vocab" in vars(each):
            each.set_vocab = set_vocab
    if hasattr(converter, "no_mtp"):
        converter.no_mtp = not config.get("mtp_num_hidden_layers")
    converter(folder, gguf.LlamaFileType.ALL_F32, path).write()


if __name__ == "__main__":
    main()
