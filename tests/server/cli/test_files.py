"""Files of options: other kinds than regular files are refused before the work."""

from pathlib import Path

import pytest

from cli import test_files as files
from cli.test_files import MODEL
from command_line import Command


@pytest.mark.parametrize("kind", ["a named pipe", "a device"])
@pytest.mark.parametrize(
    "arguments",
    [
        f"serve {MODEL} --api-key-file FILE",
        f"serve {MODEL} --guardrails FILE",
        f"serve {MODEL} --moderation-prompt FILE",
        f"batch {MODEL} FILE OUT",
        f"batch {MODEL} REQUESTS FILE",
    ],
)
def test_a_file_of_another_kind_is_refused(
    command: Command, arguments: str, kind: str, tmp_path: Path
) -> None:
    request = (
        '{"custom_id": "1", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x"}}'
    )
    (tmp_path / "requests.jsonl").write_text(f"{request}\n")
    files.test_a_file_of_another_kind_is_refused(command, arguments, kind, tmp_path)
