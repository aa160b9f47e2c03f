"""The rules of the tree, checked on its syntax: who imports whom, what a pure core may do, how large it gets."""

import ast
import dataclasses
import importlib
import importlib.metadata
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from protocol.settings import SECTIONS, field_sentences

ROOT = Path(__file__).resolve().parent.parent

RUNGS = [
    {"deploy"},
    {"bench"},
    {"simulator"},
    {"conductor"},
    {"prefill_pool", "decode_pool"},
    {"engine", "kvcache_pool"},
    {"kernels"},
    {"protocol"},
]
"""The ladder, top first. A package may import those on lower rungs, not its neighbours."""

PACKAGES = {name: rung for rung, names in enumerate(RUNGS) for name in names if (ROOT / name).is_dir()}
SERVICES = {"conductor", "prefill_pool", "decode_pool", "kvcache_pool"}

PURE = {
    "conductor/admit.py",
    "conductor/place.py",
    "conductor/rest.py",
    "conductor/view.py",
    "conductor/estimate.py",
    "conductor/forecast.py",
    "conductor/health.py",
    "conductor/retries.py",
    "conductor/roster.py",
    "conductor/rules.py",
    "conductor/fit.py",
    "conductor/kind.py",
    "conductor/senders.py",
    "conductor/lengths.py",
    "conductor/line.py",
    "conductor/load.py",
    "conductor/mean.py",
    "conductor/text.py",
    "conductor/ask.py",
    "prefill_pool/schedule.py",
    "decode_pool/schedule.py",
    "kvcache_pool/buffers.py",
    "kvcache_pool/codec.py",
    "kvcache_pool/draining.py",
    "kvcache_pool/events.py",
    "kvcache_pool/index.py",
    "kvcache_pool/idle.py",
    "kvcache_pool/leases.py",
    "kvcache_pool/news.py",
    "kvcache_pool/counts.py",
    "kvcache_pool/lives.py",
    "kvcache_pool/eviction.py",
    "kvcache_pool/names.py",
    "kvcache_pool/owned.py",
    "kvcache_pool/pins.py",
    "kvcache_pool/replicas.py",
    "kvcache_pool/retrying.py",
    "kvcache_pool/rooms.py",
    "kvcache_pool/slots.py",
    "kvcache_pool/transfer/grain.py",
    "kvcache_pool/tenants.py",
    "engine/architecture.py",
    "engine/ending.py",
    "engine/pace.py",
    "engine/paging.py",
    "engine/sampling.py",
    "protocol/blocks.py",
    "protocol/cluster.py",
    "protocol/errors.py",
    "protocol/frames.py",
    "protocol/hearsay.py",
    "protocol/ids.py",
    "protocol/message.py",
    "protocol/registry.py",
    "simulator/hitrates.py",
    "simulator/hot.py",
    "simulator/record.py",
    "simulator/rivals/colocated.py",
    "simulator/rivals/search.py",
    "simulator/table.py",
}
IMPURE_MODULES = {
    *("asyncio", "time", "random", "secrets", "uuid", "logging", "threading", "socket", "select", "subprocess"),
    *("torch", "zmq", "aiohttp", "prometheus_client", "redis", "kernels"),
}

SHELL_TORCH_FREE = {"conductor", "protocol", "deploy"}
"""Packages that import without torch as a whole; besides, every api and every pure core does."""

FUNCTION_LINES_MAX = 70
FILE_LINES_MAX = 400

SOURCES = sorted(path for name in PACKAGES for path in (ROOT / name).rglob("*.py"))
TREES = {path.relative_to(ROOT).as_posix(): ast.parse(path.read_text(encoding="utf-8")) for path in SOURCES}


def module_of(name: str) -> str:
    """`protocol/rpc.py` -> `protocol.rpc`."""
    return name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


MODULES = {module_of(name) for name in TREES}


def imports(name: str) -> Iterator[tuple[int, str]]:
    """Line and dotted name of all that a file imports, in functions too; `from package import module` included."""
    for node in ast.walk(TREES[name]):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.module is not None
            assert node.level == 0, f"{name}:{node.lineno}: a relative import"
            submodules = [f"{node.module}.{alias.name}" for alias in node.names]
            found = [module for module in submodules if module in MODULES]
            yield from ((node.lineno, module) for module in found or [node.module])


def ladder_faults(name: str, imported: list[tuple[int, str]]) -> list[str]:
    """What in a file's imports goes against the ladder, or past another service's api."""
    package, faults = name.split("/")[0], []
    for line, module in imported:
        top = module.split(".")[0]
        if top == package or top not in PACKAGES:
            continue
        if PACKAGES[top] <= PACKAGES[package]:
            faults.append(f"{name}:{line} imports {module}, which is not below it on the ladder")
        elif top in SERVICES and not name.endswith("/__main__.py"):
            if package == "deploy" and module.split(".")[1:] != ["config"]:
                faults.append(f"{name}:{line} imports {module}; of a service only its config")
            elif package in SERVICES and module.split(".")[1:] != ["api"]:
                faults.append(f"{name}:{line} imports {module}; of another service only its api")
    return faults


def test_imports_point_down_the_ladder() -> None:
    assert [fault for name in TREES for fault in ladder_faults(name, list(imports(name)))] == []


def test_the_ladder_test_sees_faults() -> None:
    assert ladder_faults("protocol/x.py", [(1, "engine.api")])
    assert ladder_faults("prefill_pool/x.py", [(1, "decode_pool.api")])
    assert ladder_faults("prefill_pool/x.py", [(1, "kvcache_pool.index")])
    assert ladder_faults("deploy/x.py", [(1, "conductor.gateway")])
    assert ladder_faults("deploy/x.py", [(1, "conductor.api")])
    assert not ladder_faults("deploy/x.py", [(1, "conductor.config")])
    assert not ladder_faults("prefill_pool/x.py", [(1, "kvcache_pool.api"), (2, "engine.paging")])
    assert not ladder_faults("prefill_pool/__main__.py", [(1, "kvcache_pool.transfer.shm")])


def test_pure_cores_do_not_wait_look_at_clocks_draw_or_log() -> None:
    assert TREES.keys() >= PURE
    faults = []
    for name in PURE:
        faults += [
            f"{name}:{line} imports {module}"
            for line, module in imports(name)
            if module.split(".")[0] in IMPURE_MODULES
        ]
        for node in ast.walk(TREES[name]):
            if isinstance(node, (ast.Await, ast.AsyncFor, ast.AsyncWith)):
                faults.append(f"{name}:{node.lineno} waits")
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Name)
                and node.func.id in ("open", "print")
            ):
                faults.append(f"{name}:{node.lineno} does input or output")
    assert faults == []


def torch_free() -> list[str]:
    """Modules that must import without torch."""
    names = [name for name in TREES if name.split("/")[0] in SHELL_TORCH_FREE]
    names += [name for name in TREES if name.endswith("/api.py") or "/api/" in name or name in PURE]
    return sorted({module_of(name) for name in names})


def test_contracts_cores_and_the_conductor_import_without_torch() -> None:
    code = (
        "import importlib, sys\n"
        "for name in sys.argv[1:]:\n"
        "    importlib.import_module(name)\n"
        "    if 'torch' in sys.modules or 'transformers' in sys.modules:\n"
        "        sys.exit(f'{name} imports torch')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *torch_free()], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr


def test_functions_and_files_are_small() -> None:
    faults = []
    for name, tree in TREES.items():
        lines = len((ROOT / name).read_text(encoding="utf-8").splitlines())
        if lines > FILE_LINES_MAX:
            faults.append(f"{name} has {lines} lines")
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                length = (node.end_lineno or node.lineno) - node.lineno + 1
                if length > FUNCTION_LINES_MAX:
                    faults.append(f"{name}:{node.lineno} {node.name} has {length} lines")
    assert faults == []


def test_nothing_is_left_unfinished() -> None:
    marks = re.compile(r"\b(TO" r"DO|FIX" r"ME|XX" r"X)\b")
    texts = {path: path.read_text(encoding="utf-8") for path in [*SOURCES, *(ROOT / "tests").rglob("*.py")]}
    assert [str(path) for path, text in texts.items() if marks.search(text)] == []


def test_only_the_command_line_prints() -> None:
    faults = [
        f"{name}:{node.lineno}"
        for name, tree in TREES.items()
        if name.split("/")[0] not in ("deploy", "bench") and name != "simulator/__main__.py"
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
    ]
    assert faults == []


def test_no_bare_except_and_no_task_without_an_owner() -> None:
    faults = []
    for name, tree in TREES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ExceptHandler) and node.type is None:
                faults.append(f"{name}:{node.lineno} catches everything")
            match node:
                case ast.Expr(
                    value=ast.Call(func=ast.Attribute(value=ast.Name(id="asyncio"), attr="create_task"))
                ):
                    faults.append(f"{name}:{node.lineno} starts a task that nobody holds")
    assert faults == []


def test_every_module_is_used() -> None:
    imported = {module for name in TREES for _, module in imports(name)}
    text = (ROOT / "pyproject.toml").read_text() + "".join(path.read_text() for path in SOURCES)
    orphans = [
        module
        for name in TREES
        if not name.endswith(("/__init__.py", "/__main__.py", "/api.py"))
        and (module := module_of(name)) not in imported
        and f"{module}:main" not in text  # a command
        and f'"{module}"' not in text  # run as `python -m`
        and any((ROOT / name.split("/")[0]).glob("__main__.py")) | (name.split("/")[0] == "deploy")
    ]
    assert orphans == []


def test_our_package_names_belong_to_us() -> None:
    owners = importlib.metadata.packages_distributions()
    taken = {name: set(owners.get(name, [])) - {"dango-serve"} for name in PACKAGES}
    assert {name: others for name, others in taken.items() if others} == {}


def config_sections() -> list[type]:
    """Every dataclass of the source whose name ends in Config."""
    sections = []
    for name, tree in TREES.items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and node.name.endswith("Config") and node.decorator_list:
                sections.append(getattr(importlib.import_module(module_of(name)), node.name))
    return sections


@pytest.mark.parametrize("section", config_sections(), ids=lambda section: section.__name__)
def test_every_setting_has_its_sentence(section: type) -> None:
    sentences = field_sentences(section)
    assert [field.name for field in dataclasses.fields(section) if not sentences.get(field.name)] == []
    assert section.__dataclass_params__.frozen, "a section is frozen"  # type: ignore[attr-defined]
    assert section.__name__.removesuffix("Config").lower() in SECTIONS


def test_the_project_speaks_of_no_machine_of_ours() -> None:
    places = re.compile(r"/wo" r"rk/|/tm" r"p/m/|/ro" r"ot/|/ho" r"me/[a-z]")
    paths = [
        *ROOT.glob("*.md"),
        *ROOT.glob("*.toml"),
        *ROOT.glob("Makefile"),
        *(ROOT / ".ci").iterdir(),
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / "tests").rglob("*.py"),
        *SOURCES,
    ]
    found = {
        f"{path.relative_to(ROOT)}: {hit.group()}"
        for path in paths
        if (hit := places.search(path.read_text(encoding="utf-8")))
    }
    assert found == set()
