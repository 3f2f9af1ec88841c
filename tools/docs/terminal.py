"""Draw a chat in the terminal, with green draft tokens, into an SVG.

    python tools/docs/terminal.py        # writes docs/plots/chat.svg

The picture is what ``pronk chat`` prints on a terminal of 64 columns, for the question in
``examples/question.txt``; speeds are those of this machine.
"""

from __future__ import annotations

import argparse
import os
import pty
import subprocess
import sys
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import TerminalTheme
from rich.text import Text

ROOT = Path(__file__).resolve().parents[2]
WIDTH = 64  # columns: legible on a phone
# Background, text, and black, red, green, yellow, blue, magenta, cyan, white.
THEME = TerminalTheme(
    (24, 26, 31),
    (214, 218, 224),
    [
        (24, 26, 31),
        (224, 108, 117),
        (120, 200, 120),
        (214, 180, 100),
        (97, 175, 239),
        (198, 120, 221),
        (86, 182, 194),
        (214, 218, 224),
    ],
)
# rich's own format asks for fonts of another server.
FORMAT = """\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="680" role="img">
<title>A chat with pronk in a terminal</title>
<style>
.{unique_id}-matrix {{
  font-family: ui-monospace, Menlo, Consolas, monospace;
  font-size: {char_height}px;
  line-height: {line_height}px;
}}
{styles}
</style>
<defs>
<clipPath id="{unique_id}-clip-terminal">
<rect x="0" y="0" width="{terminal_width}" height="{terminal_height}" />
</clipPath>
{lines}
</defs>
{chrome}
<g transform="translate({terminal_x}, {terminal_y})" clip-path="url(#{unique_id}-clip-terminal)">
{backgrounds}
<g class="{unique_id}-matrix">
{matrix}
</g>
</g>
</svg>
"""


def terminal_output(command: list[str], question: str) -> str:
    """Return what a command prints on a terminal, with its escape sequences."""
    ours, theirs = pty.openpty()
    environment = os.environ | {
        "COLUMNS": str(WIDTH),
        "LINES": "50",
        "TERM": "xterm-256color",
        "NO_COLOR": "",
    }
    process = subprocess.Popen(  # noqa: S603 - our own command
        command, stdin=subprocess.PIPE, stdout=theirs, stderr=theirs, env=environment
    )
    os.close(theirs)
    assert process.stdin is not None
    process.stdin.write(question.encode())
    process.stdin.close()
    pieces = []
    while True:
        try:
            piece = os.read(ours, 65536)
        except OSError:  # Linux: the program has ended
            break
        if not piece:
            break
        pieces.append(piece)
    if process.wait():
        sys.exit(f"terminal: {command[0]} failed: {b''.join(pieces).decode(errors='replace')}")
    return b"".join(pieces).decode()


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "plots" / "chat.svg")
    arguments = parser.parse_args()
    question = (ROOT / "examples" / "question.txt").read_text(encoding="utf-8")
    options = ["--stats", "--max-tokens", "192", "--seed", "2"]
    printed = terminal_output([sys.executable, "-m", "pronk", "chat", *options], question)
    console = Console(record=True, width=WIDTH, file=Path(os.devnull).open("w"))  # noqa: SIM115
    console.print(Text("$ pronk chat --stats", style="bold"))
    console.print(Text(f"> {question.strip()}\n"))
    # The last erased line is that of the progress bar.
    answer = printed.rpartition("\x1b[2K")[2].replace("\r\n", "\n")
    console.print(Text.from_ansi(answer.strip()))
    svg = console.export_svg(title="pronk", theme=THEME, code_format=FORMAT, unique_id="chat")
    arguments.out.write_text(svg, encoding="utf-8")
    print(arguments.out)


if __name__ == "__main__":
    main()
