"""Run the steps of the Dockerfile outside of a container, and ask the server that it starts.

    python tools/dockerfile.py             # SmolLM2, as the image
    python tools/dockerfile.py --model DIR # another model

Folders of the image, such as ``/opt/pronk``, lie in a temporary folder, and the base images are the
Python that runs this script. Steps for which an image is needed (packages of Debian, users) are
named and left out. The health check of the Dockerfile decides when the server is ready.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("/opt/pronk", "/models", "/pronk")  # folders of the image
ONLY_IN_IMAGES = ("apt-get", "useradd")  # programs of the steps that are left out
PORT = 8000  # of the server, in the image
START_SECONDS = 600.0  # the first start downloads a model

Instruction = tuple[str, str]


def instructions(text: str) -> Iterator[Instruction]:
    """Yield the instructions of a Dockerfile: their names, and the rest of their lines."""
    plain = re.sub(r"^#.*\n", "", text, flags=re.MULTILINE).replace("\\\n", " ")
    for line in plain.splitlines():
        name, _, rest = line.strip().partition(" ")
        if name:
            yield name, rest.strip()


def inside(text: str, folder: Path) -> str:
    """Return a command with the image's folders in ``folder``."""
    for name in FOLDERS:
        text = re.sub(rf"(?<![\w/.]){name}(?![\w])", f"{folder}{name}", text)
    return text


def environment_of(steps: list[Instruction], folder: Path) -> dict[str, str]:
    """Return the environment of the image's programs."""
    found = dict(os.environ)
    for name, rest in steps:
        if name == "ENV":
            for pair in inside(rest, folder).split():
                key, _, value = pair.partition("=")
                found[key] = value.replace("$PATH", found["PATH"])
    return found


def install(steps: list[Instruction], folder: Path) -> None:
    """Run the RUN steps of the Dockerfile in a copy of the files that COPY takes."""
    source = Path(inside("/pronk", folder))
    listed = subprocess.check_output(["git", "ls-files", "-z"], cwd=ROOT, text=True)  # noqa: S607
    for name in filter(None, listed.split("\0")):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, source / name)
    for name, rest in steps:
        if name != "RUN":
            continue
        if any(program in rest for program in ONLY_IN_IMAGES):
            print(f"left out: {rest}", flush=True)
            continue
        print(f"run: {rest}", flush=True)
        command = inside(rest, folder).replace("python -m", f"{sys.executable} -m", 1)
        subprocess.run(command, shell=True, check=True, cwd=source)  # noqa: S602 - our own Dockerfile


@contextmanager
def server(
    steps: list[Instruction], environment: dict[str, str], model: str | None
) -> Iterator[str]:
    """Start the image's program, wait for its health check, and yield the server's address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    entry = json.loads(next(rest for name, rest in steps if name == "ENTRYPOINT"))
    check = next(rest for name, rest in steps if name == "HEALTHCHECK")
    command = json.loads(check[check.index("[") :].replace(f":{PORT}", f":{port}"))
    options = ["--port", str(port), *(["--model", model] if model else [])]
    program = shutil.which(entry[0], path=environment["PATH"])
    assert program is not None, entry
    process = subprocess.Popen([program, *entry[1:], *options], env=environment)  # noqa: S603
    try:
        deadline = time.monotonic() + START_SECONDS
        healthy = [shutil.which(command[0], path=environment["PATH"]) or "", *command[1:]]
        while subprocess.run(healthy, capture_output=True, check=False).returncode:  # noqa: S603
            if process.poll() is not None or time.monotonic() > deadline:
                sys.exit("dockerfile: expected a healthy server, found none")
            time.sleep(1.0)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait()


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", help="model of the server; by default that of the image")
    arguments = parser.parse_args()
    steps = list(instructions((ROOT / "Dockerfile").read_text(encoding="utf-8")))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        install(steps, folder)
        key = secrets.token_urlsafe()
        environment = environment_of(steps, folder) | {"PRONK_API_KEY": key}
        body = {"prompt": "def fibonacci(n):", "max_tokens": 8}
        with server(steps, environment, arguments.model) as url:
            request = urllib.request.Request(  # noqa: S310 - the address is our own server's
                f"{url}/v1/completions",
                json.dumps(body).encode(),
                {"Content-Type": "application/json", "Authorization": f"Bearer {key}"},
            )
            with urllib.request.urlopen(request, timeout=300) as reply:  # noqa: S310
                text = json.load(reply)["choices"][0]["text"]
        if not text:
            sys.exit("dockerfile: expected a text, found none")
        print(f"the server answered {text!r}")


if __name__ == "__main__":
    main()
