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
        f"verify {MODEL} --prompts FILE",
        f"bench {MODEL} --prompts FILE",
        f"bench {MODEL} --moderation FILE",
        "bench --replay FILE",
        "datastore build OUT FILE --model pronk-tiny",
        "verify --url http://127.0.0.1:1 --api-key-file FILE",
        f"explain x {MODEL} --plot FILE",
        f"verify {MODEL} --json FILE",
        f"bench {MODEL} --json FILE",
        f"bench {MODEL} --markdown FILE",
        f"bench {MODEL} --trace FILE",
    ],
)
def test_a_file_of_another_kind_is_refused(
    command: Command, arguments: str, kind: str, tmp_path: Path
) -> None:
    files.test_a_file_of_another_kind_is_refused(command, arguments, kind, tmp_path)
