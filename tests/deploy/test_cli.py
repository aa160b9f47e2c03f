"""The `dango` command teaches, and does not load what it does not need."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from deploy.cli import MODULES, VERBS

ROOT = Path(__file__).resolve().parents[2]


def dango(*arguments: str, **environ: str) -> "subprocess.CompletedProcess[str]":
    argv = [sys.executable, "-m", "deploy.cli", *arguments]
    env = os.environ | environ
    return subprocess.run(argv, cwd=ROOT, env=env, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("arguments", [("--help",), ()])
def test_help_names_every_verb_with_examples(arguments: tuple[str, ...]) -> None:
    done = dango(*arguments)
    assert done.returncode == 0
    for verb in VERBS:
        assert f"    {verb}" in done.stdout
    assert "dango chat " in done.stdout


def test_version_without_torch() -> None:
    code = (
        "import sys\n"
        "from deploy.cli import main\n"
        "try:\n"
        "    main(['--version'])\n"
        "except SystemExit as end:\n"
        "    assert end.code == 0\n"
        "assert 'torch' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("dango 0.")


@pytest.mark.parametrize("arguments", [("fly",), ("serve", "--wings", "2")])
def test_what_it_does_not_know_is_refused(arguments: tuple[str, ...]) -> None:
    done = dango(*arguments)
    assert done.returncode == 2
    assert "usage: dango" in done.stderr


@pytest.mark.parametrize("verb", ["serve", "chat", *MODULES])
def test_each_verb_explains_itself(verb: str) -> None:
    done = dango(verb, "--help")
    assert done.returncode == 0, done.stderr
    assert f"usage: dango {verb}" in done.stdout
    assert "default:" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--prefill", "0"), "prefill must be from 1 to 64, not 0"),
        (("--prefill", "many"), "--prefill: prefill must be a whole number, not 'many'"),
        (("--port", "70000"), "port must be from 0 to 65535, not 70000"),
        (("--config", "nowhere.toml"), "cannot read the settings file nowhere.toml"),
        (("no/such/model.gguf", "--port", "0"), "no/such/model.gguf"),
    ],
)
def test_a_mistake_ends_serve_with_a_sentence(arguments: tuple[str, ...], sentence: str) -> None:
    done = dango("serve", *arguments)
    assert done.returncode == 1
    assert sentence in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("verb", ["serve", "decode"])
def test_a_mistake_in_the_settings_of_an_instance_is_one_sentence_before_anything_starts(verb: str) -> None:
    done = dango(verb, DANGO_DECODE_BATCH_MX="8")
    assert done.returncode == (1 if verb == "serve" else 2)
    assert done.stderr.endswith(
        ": unknown environment variable DANGO_DECODE_BATCH_MX; did you mean 'DANGO_DECODE_BATCH_MAX'?\n"
    )
    assert len(done.stderr.splitlines()) == 1


def test_the_sections_are_checked_with_what_all_share(tmp_path: Path) -> None:
    file = tmp_path / "dango.toml"
    file.write_text("[prefill]\nchunk_tokens = 72")
    given = ("no/such/model.gguf", "--port", "0", "--config", str(file))
    assert "no/such/model.gguf" in dango("serve", *given, "--block-tokens", "24").stderr
    done = dango("serve", *given)
    assert done.stderr == "dango: [prefill] chunk_tokens must be a multiple of block_tokens (16)\n"


def test_a_port_in_use_ends_serve_before_anything_starts() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        done = dango("serve", "--port", str(server.getsockname()[1]))
    assert done.returncode == 1
    assert done.stderr.startswith("dango: cannot listen on 127.0.0.1 port")
    assert "starting" not in done.stderr


def test_a_log_folder_that_is_a_file_is_told_in_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "log").touch()
    done = dango("serve", "--port", "0", "--log-dir", str(tmp_path / "log"))
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert done.stderr.startswith(f"dango: log_dir is {tmp_path / 'log'}, which cannot be used as a folder")


def test_ctrl_c_while_it_still_imports_ends_it_without_a_word() -> None:
    code = (
        "import os, signal, sys\n"
        "from deploy.cli import main\n"
        "class Pressed:\n"
        "    def find_spec(self, name, path, target=None):\n"
        "        if name == 'deploy.serve':\n"
        "            os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, Pressed())\n"
        "sys.exit(main(['serve', 'no/such/model', '--port', '0']))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")
