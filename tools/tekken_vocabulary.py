"""Write the vocabulary of a Mistral tokenizer (Tekken) to a GGUF file without weights.

    pip install gguf mistral-common
    python tools/tekken_vocabulary.py FOLDER OUT.gguf

``FOLDER`` has a ``tekken.json``. The package ``mistral-common`` has such files, one for each
version, in its folder ``data``. The file has the tokens, types and merges that llama.cpp's
converter would write, with the code of the package ``gguf``.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import gguf
from gguf.vocab import MistralVocab


def main() -> None:
    """Write the file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("out", type=Path)
    options = parser.parse_args()
    vocabulary = MistralVocab(options.folder)
    tokens = list(vocabulary.all_tokens())
    writer = gguf.GGUFWriter(options.out, "llama")
    writer.add_vocab_size(vocabulary.vocab_size)
    writer.add_tokenizer_model(vocabulary.gguf_tokenizer_model)
    writer.add_tokenizer_pre("tekken")
    writer.add_token_list([text for text, _, _ in tokens])
    writer.add_token_scores([score for _, score, _ in tokens])
    writer.add_token_types([kind for _, _, kind in tokens])
    writer.add_token_merges(vocabulary.extract_vocab_merges_from_model())
    writer.add_bos_token_id(vocabulary.bos_id)
    writer.add_eos_token_id(vocabulary.eos_id)
    writer.add_unk_token_id(vocabulary.unk_id)
    writer.add_pad_token_id(vocabulary.pad_id)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()


if __name__ == "__main__":
    main()
