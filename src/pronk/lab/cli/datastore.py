"""``pronk datastore``: build and inspect the datastores of the drafter ``retrieval``."""

from collections.abc import Iterator, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from pronk.commands import Status, announce, interruptible, option, status_bar
from pronk.train.corpus import SourceSpec, read_source, spec_of

if TYPE_CHECKING:
    from pronk.text import Tokenizer

app = typer.Typer(
    help="Build datastores for the drafter retrieval.",
    no_args_is_help=True,
    rich_markup_mode="rich",
)

_GZIP_RATIO = 3  # assumed size of a text / size of its .gz file, for the progress bar
_DOCUMENTS_PER_CALL = 64  # number of documents that one call of the tokenizer encodes
_MAX_PIECE = 1 << 20  # characters; a longer document is cut into pieces before it is tokenized


@app.command(no_args_is_help=True)
def build(
    out: Annotated[Path, typer.Argument(help="Folder to write, new or empty.", show_default=False)],
    text: Annotated[
        list[Path],
        typer.Argument(
            help="Text files, folders of them (.txt, .md, .rst, .py), or JSON lines with a text "
            "(.jsonl, .jsonl.gz).",
            metavar="FILES",
            show_default=False,
        ),
    ],
    *,
    model: Annotated[
        str | None,
        option(
            "Model whose tokenizer is used: a folder or a name, as in pronk pull.",
            show_default="smollm2",
        ),
    ] = None,
    limit_tokens: Annotated[
        int | None, option("Maximum number of tokens.", min=1, show_default="all text")
    ] = None,
) -> None:
    """Build a datastore from text.

    Use text similar to the model's later output: your code, your documentation, earlier answers. A
    datastore takes 6 bytes per token (8 for a vocabulary of 65,536 and more) and works with the
    tokenizer of its model only.

    [bold]Examples[/]

    pronk datastore build code-store src/ docs/

    pronk datastore build answers answers.jsonl.gz --model Qwen/Qwen3-0.6B --limit-tokens 10000000

    pronk generate "def main(" --drafter "retrieval(datastore='code-store')"
    """
    screen = Console(highlight=False, soft_wrap=True, stderr=True)
    with interruptible("interrupted; no partial datastore was kept"), status_bar(screen) as bar:
        status = announce(screen, bar, "tokenizing", "--limit-tokens 1000000")
        _build(out, text, model, limit_tokens, status)
    screen.print(f"{out}: {_summary(out)}", markup=False)


@app.command(no_args_is_help=True)
def info(
    path: Annotated[Path, typer.Argument(help="Folder of the datastore.", show_default=False)],
) -> None:
    """Check a datastore and print its contents.

    [bold]Examples[/]

    pronk datastore info code-store
    """
    from pronk.lab.drafters.datastore.reader import Datastore

    store = Datastore.open(path)
    store.verify()
    typer.echo(f"{path}: {_summary(path)}, undamaged")
    typer.echo(f"tokenizer {store.header.vocabulary}")
    for name in store.header.sources:
        typer.echo(f"from {name}")


def _build(
    out: Path, text: Sequence[Path], model: str | None, limit: int | None, status: Status
) -> None:
    from pronk.base import check_output_folder, convert_write_errors, new_folder
    from pronk.checkpoint import read_config, resolve_model
    from pronk.lab.drafters.datastore.builder import SORTING, require_sorter, write_datastore
    from pronk.text import Tokenizer

    require_sorter()
    check_output_folder(out, 0)
    sources = [spec_of(path, "files") for path in text]
    sizes = [*map(_text_bytes, text)]
    folder = resolve_model(model)
    vocab_size = read_config(folder).vocab_size
    tokenizer = Tokenizer.load(folder, vocab_size)

    done = 0  # bytes of text that were tokenized

    def documents() -> Iterator[list[int]]:
        nonlocal done
        for number, source in enumerate(sources):
            done = sum(sizes[:number])
            for ids, num_bytes in _encode(source, tokenizer):
                done += num_bytes
                yield ids

    def show_progress(tokens: int) -> None:
        if tokens == SORTING:
            status("sorting", 0, 0)
        elif limit is None:
            status("tokenizing", min(done, sum(sizes)), sum(sizes))
        else:
            status("tokenizing", tokens, limit)

    with convert_write_errors(out, "the datastore"), new_folder(out) as partial:
        write_datastore(
            partial,
            documents(),
            vocabulary=tokenizer.fingerprint,
            vocab_size=vocab_size,
            limit=limit,
            sources=[path.resolve().name for path in text],
            on_progress=show_progress,
        )


def _encode(source: SourceSpec, tokenizer: "Tokenizer") -> Iterator[tuple[list[int], int]]:
    """Yield each document's token ids, without special tokens, and its size in bytes of text."""
    texts = (document.text for document in read_source(source))
    while chunk := list(islice(texts, _DOCUMENTS_PER_CALL)):
        # Replace lone surrogates, which JSON strings can hold and tokenizers reject.
        encoded_texts = [text.encode(errors="replace") for text in chunk]
        pieces = [list(_split_text(text.decode())) for text in encoded_texts]
        flat = [*chain.from_iterable(pieces)]
        encoded = iter(tokenizer.encode_batch(flat, add_special_tokens=False))
        for text, text_pieces in zip(encoded_texts, pieces, strict=True):
            yield [*chain.from_iterable(islice(encoded, len(text_pieces)))], len(text)


def _text_bytes(path: Path) -> int:
    """Return the approximate size of the text in a file or folder, in bytes."""
    if path.is_dir():
        return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    return path.stat().st_size * (_GZIP_RATIO if path.suffix == ".gz" else 1)


def _split_text(text: str) -> Iterator[str]:
    """Cut a text into pieces of at most ``_MAX_PIECE`` characters, if possible at ends of lines."""
    start = 0
    while len(text) - start > _MAX_PIECE:
        end = text.rfind("\n", start, start + _MAX_PIECE) + 1 or start + _MAX_PIECE
        yield text[start:end]
        start = end
    yield text[start:]


def _summary(folder: Path) -> str:
    from pronk.lab.drafters.datastore.reader import Header

    header = Header.read(folder)
    size = sum(header.file_sizes().values())
    return f"{header.tokens:,} tokens of {header.documents:,} documents, {size:,} bytes"
