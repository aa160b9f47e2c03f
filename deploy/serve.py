"""`dango serve`: one of each, or several, on this machine, until Ctrl-C."""

import argparse
import asyncio
import os
import shlex
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from conductor.config import ConductorConfig
from decode_pool.config import DecodeConfig
from deploy.config import ServeConfig
from deploy.fleet import Fleet, NotReady
from deploy.instance import Command, Died, Instance
from deploy.runtime import NoRuntimeFolder, PortTaken, base_url, claim_port, runtime_folder
from engine.fetch import FetchError, model_name, resolve_model
from kvcache_pool.config import KVCacheConfig
from prefill_pool.config import PrefillConfig
from protocol.settings import SettingsError, add_flags, load_section

ABOUT = """\
Start the whole service on this machine: a Conductor, and one prefill, KVCache and decode instance (or
more), each its own process. Ctrl-C ends all of them and leaves nothing behind.

MODEL is one of
  (nothing)            SmolLM2-135M-Instruct, fetched once into your cache folder
  path/to/model.gguf   a GGUF file
  path/to/folder       a Hugging Face folder: config.json, safetensors, tokenizer.json
  owner/name           a Hugging Face repository
"""

EXAMPLES = """\
examples:
  dango serve
  dango serve --prefill 2 --decode 2 --port 9000
  dango serve ./Qwen2.5-0.5B-Instruct --dtype float32
  dango serve --config dango.toml        sections [conductor] [prefill] [kvcache] [decode] [serve]

Every setting is also an environment variable, such as DANGO_SERVE_PORT=9000; those of the instances too
(`dango prefill --help` and so on). A flag goes before the environment, that before the file.
"""

QUIET_THREADS = {"OMP_WAIT_POLICY": "passive", "KMP_BLOCKTIME": "0"}
"""Several processes share the cores: a thread that waits by spinning takes them from its neighbours."""

SECTIONS = {
    "conductor": ConductorConfig,
    "kvcache": KVCacheConfig,
    "prefill": PrefillConfig,
    "decode": DecodeConfig,
}
"""What the instances will read for themselves."""


@dataclass(frozen=True)
class Model:
    """What is served: where its files are, and the name that clients use."""

    path: Path
    name: str


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Teach the parser what `dango serve` takes."""
    parser.description, parser.epilog = ABOUT, EXAMPLES
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("given_model", nargs="?", metavar="MODEL", help="what to serve; the same as --model")
    parser.add_argument("--config", metavar="FILE", type=Path, help="settings of all instances, in TOML")
    add_flags(parser, ServeConfig)


def serve(arguments: argparse.Namespace) -> int:
    """Run the service until it is stopped. Returns the exit code."""
    arguments.model = arguments.given_model or arguments.model
    try:
        config = load_section(ServeConfig, "serve", flags=arguments, environ=os.environ, file=arguments.config)
        log_dir = _log_folder(config.log_dir)
        check_sections(config, arguments.config)
        port = claim_port(config.host, config.port)
        model = _resolve(config.model, config.model_name)
        with runtime_folder() as folder:
            commands = plan(config, model, folder, port, arguments.config)
            hello = welcome(model, base_url(config.host, port), program(), _address(folder, "conductor"))
            asyncio.run(_run(commands, config, log_dir, base_url(config.host, port), hello))
    except (SettingsError, PortTaken, NoRuntimeFolder, FetchError, Died, NotReady) as error:
        print(f"dango: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:  # while fetching: nothing runs yet
        print("dango: stopped before anything was started", file=sys.stderr)
        return 130
    return 0


def check_sections(config: ServeConfig, file: Path | None) -> None:
    """Read what the instances will read: a mistake is told before anything starts. Raises SettingsError."""
    shared = argparse.Namespace(
        dtype=config.dtype, block_tokens=config.block_tokens, kv_compression=config.kv_compression
    )
    for name, section in SECTIONS.items():
        load_section(section, name, flags=shared, environ=os.environ, file=file)


def plan(config: ServeConfig, model: Model, folder: Path, port: int, config_file: Path | None) -> list[Command]:
    """What to run, the Conductor first."""
    threads = config.threads or _threads_each(config.prefill + config.decode)
    file = ["--config", str(config_file.resolve())] if config_file else []
    shared_model = ["--model", str(model.path), "--model-name", model.name]
    shared_model += _given("--dtype", config.dtype) + _given("--block-tokens", config.block_tokens)
    shared_model += _given("--kv-compression", config.kv_compression)
    control = _address(folder, "conductor")
    http = ["--host", config.host, "--port", str(port), "--drain-s", str(config.drain_s)]
    conductor = ["-m", "conductor", "--listen", control, *http, *shared_model, *file]
    commands = [Command("conductor", conductor, _environ(1))]

    def instance(name: str, module: str, extra: Sequence[str], threads: int) -> None:
        where = ["--conductor", control, "--listen", _address(folder, name), "--instance", name]
        commands.append(Command(name, ["-m", module, *where, *extra, *file], _environ(threads)))

    for number in range(config.kvcache):
        directory = "--directory" if number == 0 else "--no-directory"
        instance(f"kvcache-{number}", "kvcache_pool", [directory], 1)
    for pool, count in (("prefill", config.prefill), ("decode", config.decode)):
        for number in range(count):
            extra = [*shared_model, "--threads", str(threads)]
            instance(f"{pool}-{number}", f"{pool}_pool", extra, threads)
    return commands


def _log_folder(path: str | None) -> Path | None:
    """The folder for logs, made if it is not there. Raises SettingsError."""
    if not path:
        return None
    try:
        Path(path).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SettingsError(f"log_dir is {path}, which cannot be used as a folder: {error.strerror}") from error
    return Path(path)


async def _run(
    commands: Sequence[Command], config: ServeConfig, log_dir: Path | None, url: str, hello: str
) -> None:
    def tell(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    instances = [
        Instance(
            command,
            tell,
            log_file=log_dir / f"{command.name}.log" if log_dir else None,
            verbose=config.verbose,
        )
        for command in commands
    ]
    tell(f"dango: starting {', '.join(command.name for command in commands)}")

    def tell_signal(line: str) -> None:
        tell(f"\n{line}" if sys.stderr.isatty() else line)  # the terminal has just written ^C

    fleet = Fleet(instances, url, tell_signal, drain_s=config.drain_s, stop_s=config.stop_s)
    await fleet.run(config.ready_s, lambda: print(hello, flush=True))
    tell("dango: stopped")


def welcome(model: Model, url: str, dango: str, control: str) -> str:
    """What a person wants to know when the service is up. `control` is where the Conductor hears its instances."""
    body = f'{{"model": "{model.name}", "stream": true, "messages": [{{"role": "user", "content": "Hello!"}}]}}'
    chat = f"{dango} chat" if url == "http://127.0.0.1:8000" else f"{dango} chat --url {url}"
    return f"""
Serving {model.name} at {url}

  curl -sN {url}/v1/chat/completions -H 'Content-Type: application/json' \\
    -d {shlex.quote(body)}

  {chat}    to talk with it here
  {dango} kvcache stats --conductor {control}    to see its cache
  Ctrl-C    to stop
"""


def program() -> str:
    """How to call this command from here: by its name where a shell finds it, else by its path."""
    called = Path(sys.argv[0]).absolute()
    found = shutil.which("dango")
    if called.name != "dango" or (found is not None and called.samefile(found)):
        return "dango"
    inside = called.is_relative_to(Path.cwd())
    return shlex.quote(str(called.relative_to(Path.cwd()) if inside else called))


def _resolve(spec: str | None, name: str | None) -> Model:
    path = Path(resolve_model(spec)).resolve()
    return Model(path, name or model_name(spec))


def _threads_each(instances: int) -> int:
    return max(1, len(os.sched_getaffinity(0)) // instances)


def _environ(threads: int) -> dict[str, str]:
    """What the user set stands."""
    wanted = {"OMP_NUM_THREADS": str(threads), **QUIET_THREADS}
    return {name: value for name, value in wanted.items() if name not in os.environ}


def _address(folder: Path, name: str) -> str:
    return f"ipc://{folder}/{name}.sock"


def _given(flag: str, value: object) -> list[str]:
    return [flag, str(value)] if value is not None else []
