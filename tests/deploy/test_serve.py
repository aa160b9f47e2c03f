"""`dango serve`: what it starts, and that real processes come up, answer, and leave nothing."""

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest

from deploy.config import ServeConfig
from deploy.instance import Command
from deploy.serve import Model, plan, program, welcome
from tests.tiny import tiny_model

ROOT = Path(__file__).resolve().parents[2]
MODEL = Model(Path("/models/m.gguf"), "m")


def planned(config: ServeConfig, file: Path | None = None) -> dict[str, Command]:
    return {command.name: command for command in plan(config, MODEL, Path("/run/d"), 8000, file)}


def flag(command: Command, name: str) -> str:
    return command.arguments[command.arguments.index(name) + 1]


def test_one_of_each() -> None:
    commands = planned(ServeConfig())
    assert list(commands) == ["conductor", "kvcache-0", "prefill-0", "decode-0"]
    modules = [flag(command, "-m") for command in commands.values()]
    assert modules == ["conductor", "kvcache_pool", "prefill_pool", "decode_pool"]
    assert flag(commands["conductor"], "--port") == "8000"
    assert flag(commands["conductor"], "--drain-s") == str(ServeConfig().drain_s)
    control = flag(commands["conductor"], "--listen")
    for name in ("kvcache-0", "prefill-0", "decode-0"):
        assert flag(commands[name], "--conductor") == control == "ipc:///run/d/conductor.sock"
        assert flag(commands[name], "--listen") == f"ipc:///run/d/{name}.sock"
        assert flag(commands[name], "--instance") == name
    for name in ("conductor", "prefill-0", "decode-0"):
        assert (flag(commands[name], "--model"), flag(commands[name], "--model-name")) == ("/models/m.gguf", "m")


def test_several_of_each_have_one_directory_and_share_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    commands = planned(ServeConfig(prefill=2, decode=3, kvcache=2))
    assert len(commands) == 8
    assert "--directory" in commands["kvcache-0"].arguments
    assert "--no-directory" in commands["kvcache-1"].arguments
    compute = [command for name, command in commands.items() if name.startswith(("prefill", "decode"))]
    share = max(1, len(os.sched_getaffinity(0)) // 5)
    assert {flag(command, "--threads") for command in compute} == {str(share)}
    assert {command.environ["OMP_NUM_THREADS"] for command in compute} == {str(share)}
    assert commands["conductor"].environ["OMP_NUM_THREADS"] == "1"
    assert len({flag(command, "--listen") for command in commands.values()}) == 8


def test_what_is_set_is_handed_on_and_what_is_not_is_not(tmp_path: Path) -> None:
    config = ServeConfig(dtype="float32", block_tokens=8, threads=3)
    commands = planned(config, tmp_path / "dango.toml")
    for name in ("conductor", "prefill-0", "decode-0"):
        assert (flag(commands[name], "--dtype"), flag(commands[name], "--block-tokens")) == ("float32", "8")
    assert flag(commands["decode-0"], "--threads") == "3"
    assert {flag(command, "--config") for command in commands.values()} == {str(tmp_path / "dango.toml")}
    for command in planned(ServeConfig()).values():
        assert not {"--dtype", "--block-tokens", "--config"} & set(command.arguments)


def test_what_the_user_set_in_the_environment_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_WAIT_POLICY", "active")
    assert "OMP_WAIT_POLICY" not in planned(ServeConfig())["decode-0"].environ


def test_the_welcome_has_a_line_that_works_as_it_stands() -> None:
    text = welcome(MODEL, "http://127.0.0.1:9000", "dango", "ipc:///run/conductor.sock")
    body = re.search(r"-d '(.*)'", text)
    assert body is not None
    assert json.loads(body[1])["model"] == "m"
    assert "dango chat --url http://127.0.0.1:9000" in text
    assert "  .venv/bin/dango chat    " in welcome(MODEL, "http://127.0.0.1:8000", ".venv/bin/dango", "ipc://c")


def test_the_command_is_named_as_a_shell_finds_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    called = tmp_path / "bin" / "dango"
    called.parent.mkdir()
    called.touch(mode=0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["bin/dango"])
    monkeypatch.setenv("PATH", "/nowhere")
    assert program() == "bin/dango"
    monkeypatch.chdir("/")
    monkeypatch.setattr(sys, "argv", [str(called)])
    assert program() == (str(called.relative_to("/")))
    monkeypatch.setenv("PATH", str(called.parent))
    assert program() == "dango"


# -- real processes -----------------------------------------------------------------------------------


class Service:
    """A `dango serve` of its own, in a temporary folder of its own."""

    def __init__(self, model: Path, temporary: Path, *flags: str) -> None:
        argv = [
            sys.executable,
            "-m",
            "deploy.cli",
            "serve",
            str(model),
            "--port",
            "0",
            "--dtype",
            "float32",
            *flags,
        ]
        environ = {**os.environ, "TMPDIR": str(temporary), "DANGO_KVCACHE_SIZE_BYTES": "16MiB"}
        self.process = subprocess.Popen(
            argv, cwd=ROOT, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        self.children: list[psutil.Process] = []

    def url(self) -> str:
        """Waits until it says where it is."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if found := re.match(r"Serving .* at (\S+)", line):
                self.children = psutil.Process(self.process.pid).children(recursive=True)
                return found[1]
        raise AssertionError(f"it did not become ready:\n{self.errors()}")

    def errors(self) -> str:
        assert self.process.stderr is not None
        return self.process.stderr.read()

    def end(self) -> None:
        """Whatever happened: no process stays."""
        for process in [*self.children, *psutil.Process().children(recursive=True)]:
            if process.is_running() and process.ppid() != 1:
                process.kill()
        self.process.wait(10)
        for pipe in (self.process.stdout, self.process.stderr):
            assert pipe is not None
            pipe.close()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def short() -> Iterator[Path]:
    """A temporary folder with a short name: a unix socket's path has at most 107 characters."""
    with tempfile.TemporaryDirectory(prefix="dt-") as folder:
        yield Path(folder)


async def complete(url: str, **fields: Any) -> dict[str, Any]:
    body = {"prompt": "Three dumplings on one skewer", "max_tokens": 8, "temperature": 0, **fields}
    async with aiohttp.ClientSession() as session, session.post(f"{url}/v1/completions", json=body) as response:
        assert response.status == 200, await response.text()
        answer: dict[str, Any] = await response.json()
        return answer


def shm() -> set[str]:
    return {name for name in os.listdir("/dev/shm") if name.startswith("dango-")}


@pytest.mark.cluster
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_it_serves_and_leaves_nothing_behind(model: Path, short: Path, number: signal.Signals) -> None:
    before = shm()
    service = Service(model, short)
    try:
        url = service.url()
        assert len(service.children) == 4
        assert [folder.name[:6] for folder in short.glob("dango-*")] == ["dango-"]
        assert shm() > before
        name = model.name
        answer = asyncio.run(complete(url, model=name, ignore_eos=True))
        assert answer["usage"]["completion_tokens"] == 8
        service.process.send_signal(number)
        assert service.process.wait(20) == 0, service.errors()
        assert not any(child.is_running() for child in service.children)
        assert list(short.glob("dango-*")) == []
        assert shm() == before
        assert "Traceback" not in service.errors()
    finally:
        service.end()


@pytest.mark.cluster
def test_a_killed_instance_comes_back_and_a_killed_supervisor_takes_all_along(model: Path, short: Path) -> None:
    service = Service(model, short)
    try:
        url = service.url()
        decode = next(child for child in service.children if "decode_pool" in child.cmdline())
        decode.kill()
        asyncio.run(until_it_completes(url, model.name))
        children = psutil.Process(service.process.pid).children(recursive=True)
        service.children += children
        service.process.kill()
        _, alive = psutil.wait_procs(children, timeout=15)
        assert alive == []
    finally:
        service.end()


async def until_it_completes(url: str, name: str) -> None:
    """Whatever the answers are until the successor has joined; and then it works."""
    body = {"model": name, "prompt": "Three dumplings", "max_tokens": 4}
    async with aiohttp.ClientSession() as session, asyncio.timeout(40):
        while True:
            async with session.post(f"{url}/v1/completions", json=body) as response:
                if response.status == 200:
                    return
            await asyncio.sleep(0.1)


@pytest.mark.cluster
def test_a_model_that_cannot_be_served_ends_it_with_a_reason(model: Path, short: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    for file in model.iterdir():
        if file.suffix != ".safetensors":
            (broken / file.name).write_bytes(file.read_bytes())
    service = Service(broken, short)
    try:
        assert service.process.wait(60) == 1
        assert "ended (exit code 1)" in service.errors()
        assert list(short.glob("dango-*")) == []
    finally:
        service.end()
