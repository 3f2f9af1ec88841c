"""``pronk datastore``: make the files that the drafter ``retrieval`` guesses from, and look at them.

typer wants the real types of the options: no postponed annotations here. torch is imported when a command runs.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from pronk.cli.progress import Status, status_bar
from pronk.train.sources import SourceSpec, read_source, spec_of

if TYPE_CHECKING:
    from pronk.tokenization.tokenizer import Tokenizer

__all__ = ["app"]

app = typer.Typer(help="Make datastores, which retrieval guesses from.", no_args_is_help=True, rich_markup_mode="rich")

_INTERRUPTED = 130
# A compressed file holds about so many times its size of text, which is all that the bar needs to know.
_COMPRESSION = 3
# Documents that are tokenized together, and characters: a longer text is cut at a line's end.
_CHUNK, _PIECE = 64, 1 << 20


@app.command(no_args_is_help=True)
def build(
    out: Annotated[Path, typer.Argument(help="Folder to write, new or empty.", show_default=False)],
    text: Annotated[
        list[Path],
        typer.Argument(
            help="Text files, folders of them (.txt, .md, .rst, .py), or JSON lines with a text (.jsonl, .jsonl.gz).",
            metavar="FILES",
            show_default=False,
        ),
    ],
    *,
    model: Annotated[
        str | None,
        typer.Option(
            help="Model whose tokenizer is used: a folder, or its id on the Hub. Default in a clone: pronk-tiny.",
            show_default=False,
        ),
    ] = None,
    limit_tokens: Annotated[
        int | None, typer.Option(help="Stop after so many tokens.", min=1, show_default="all text")
    ] = None,
) -> None:
    """Make a datastore from text.

    Use text that is like what the model will write: your code, your documentation, earlier answers. It takes 6 bytes
    per token (8 with a vocabulary of 65,536 and more) and belongs to the tokenizer of its model.

    [bold]Examples[/]

    pronk datastore build code-store src/ docs/

    pronk datastore build answers answers.jsonl.gz --model Qwen/Qwen3-0.6B --limit-tokens 10000000

    pronk generate "def main(" --drafter "retrieval(datastore='code-store')"
    """
    screen = Console(highlight=False, soft_wrap=True, stderr=True)
    try:
        with status_bar(screen) as status:
            _build(out, text, model, limit_tokens, status)
    except KeyboardInterrupt:
        screen.print("interrupted; nothing was kept", style="yellow")
        raise typer.Exit(_INTERRUPTED) from None
    screen.print(f"{out}: {_summary(out)}", markup=False)


@app.command(no_args_is_help=True)
def info(path: Annotated[Path, typer.Argument(help="Folder of the datastore.", show_default=False)]) -> None:
    """Check a datastore, and say what is in it.

    [bold]Examples[/]

    pronk datastore info code-store
    """
    from pronk.drafters.from_text.datastore.reader import Datastore

    store = Datastore.open(path)
    store.verify()
    typer.echo(f"{path}: {_summary(path)}, undamaged")
    typer.echo(f"tokenizer {store.header.vocabulary}")
    for name in store.header.sources:
        typer.echo(f"from {name}")


def _build(out: Path, text: Sequence[Path], model: str | None, limit: int | None, status: Status) -> None:
    from pronk.drafters.from_text.datastore.builder import SORTING, require_sorter, write_datastore
    from pronk.files.atomic import new_folder, writing
    from pronk.files.shards import check_target
    from pronk.models.loader import read_config, resolve_model
    from pronk.tokenization.tokenizer import Tokenizer

    require_sorter()
    check_target(out, 0)
    sources = [spec_of(path, "files") for path in text]
    folder = resolve_model(model)
    vocab_size = read_config(folder).vocab_size
    tokenizer = Tokenizer.load(folder, vocab_size)
    reader = _Reader(sources, tokenizer, limit)

    def say(tokens: int) -> None:
        if tokens == SORTING:
            status("sorting", 0, 0)
        else:
            status("tokenizing", *reader.progress(tokens))

    with writing(out, "the datastore"), new_folder(out) as partial:
        write_datastore(
            partial,
            reader.documents(),
            vocabulary=tokenizer.fingerprint,
            vocab_size=vocab_size,
            limit=limit,
            sources=[path.resolve().name for path in text],
            say=say,
        )


@dataclass
class _Reader:
    """The token ids of all documents; ``done`` bytes of about ``total`` have been read."""

    sources: Sequence[SourceSpec]
    tokenizer: "Tokenizer"
    limit: int | None
    done: int = 0

    def __post_init__(self) -> None:
        self.sizes = [_text_bytes(Path(str(source.path))) for source in self.sources]

    def progress(self, tokens: int) -> tuple[int, int]:
        """How much is done, and of what, once ``tokens`` are written: whichever ends first, the text or the limit."""
        total = sum(self.sizes)
        if self.limit is not None and tokens / self.limit > self.done / max(total, 1):
            return tokens, self.limit
        return min(self.done, total), total

    def documents(self) -> Iterator[list[int]]:
        """Token ids of each document, without what the tokenizer puts around a text."""
        for number, source in enumerate(self.sources):
            texts = (document.text for document in read_source(source))
            while chunk := list(islice(texts, _CHUNK)):
                yield from self._encode(chunk)
            self.done = sum(self.sizes[: number + 1])

    def _encode(self, texts: Sequence[str]) -> Iterator[list[int]]:
        # JSON can hold halves of characters, which no tokenizer takes.
        data = [text.encode(errors="replace") for text in texts]
        pieces = [list(_pieces(text.decode())) for text in data]
        flat = self.tokenizer.backend.encode_batch_fast([p for each in pieces for p in each], add_special_tokens=False)
        encoded = iter(flat)
        for text, own in zip(data, pieces, strict=True):
            self.done += len(text)
            yield [token for encoding in islice(encoded, len(own)) for token in encoding.ids]


def _text_bytes(path: Path) -> int:
    """About how much text a file or folder has."""
    if path.is_dir():
        return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    return path.stat().st_size * (_COMPRESSION if path.suffix == ".gz" else 1)


def _pieces(text: str) -> Iterator[str]:
    """Parts of a text that are short enough for the tokenizer, each ending where a line does."""
    start = 0
    while len(text) - start > _PIECE:
        end = text.rfind("\n", start, start + _PIECE) + 1 or start + _PIECE
        yield text[start:end]
        start = end
    yield text[start:]


def _summary(folder: Path) -> str:
    from pronk.drafters.from_text.datastore.layout import Header

    header = Header.read(folder)
    size = sum(header.sizes().values())
    return f"{header.tokens:,} tokens of {header.documents:,} documents, {size:,} bytes"
