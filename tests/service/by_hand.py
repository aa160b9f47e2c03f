"""A cluster whose processes are started one by one, as an operator's units would: any of them may go and come."""

import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from deploy.runtime import claim_port, remove_shm, shm_files
from tests.service.client import Client
from tests.service.processes import READY_S, Program, until

NAME = "tiny"


class ByHand:
    """Programs by name. Use as a context manager: leaving it stops what is left, whatever happened."""

    def __init__(self, model: Path, control: str | None = None) -> None:
        """`control`: where the Conductor's control port is, if not at a unix socket."""
        self._temporary = tempfile.TemporaryDirectory(prefix="dt-")
        self.folder = Path(self._temporary.name)
        self.model = model
        self.control = control or f"ipc://{self.folder}/conductor"
        self.port = claim_port("127.0.0.1", 0)
        self.client = Client(f"http://127.0.0.1:{self.port}", NAME)
        self.programs: dict[str, Program] = {}

    def __enter__(self) -> "ByHand":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pids = [program.pid for program in self.programs.values() if program.is_running()]
        shared = {file for pid in pids for file in shm_files(pid)}
        try:
            codes = {name: program.stop() for name, program in self.programs.items() if program.is_running()}
            assert set(codes.values()) <= {0}, codes
            assert not any(file.exists() for file in shared)
        finally:
            for program in self.programs.values():
                program.stop()
            self._temporary.cleanup()

    def conductor(self, *flags: str, **environ: str) -> Program:
        http = ("--host", "127.0.0.1", "--port", str(self.port), "--listen", self.control)
        return self.start("conductor", "conductor", *self._same_model(), *http, *flags, **environ)

    def kvcache(self, *flags: str, **environ: str) -> Program:
        return self.start(
            "kvcache", "kvcache-0", *self._at("kvcache-0"), "--size-bytes", "16MiB", *flags, **environ
        )

    def compute(
        self,
        verb: str,
        name: str,
        *flags: str,
        model: Path | None = None,
        within: Sequence[str] = (),
        **environ: str,
    ) -> Program:
        """A prefill or decode instance."""
        own = (*self._same_model(model), *self._at(name), "--threads", "1")
        return self.start(verb, name, *own, *flags, within=within, **environ)

    def start(self, verb: str, name: str, *arguments: str, within: Sequence[str] = (), **environ: str) -> Program:
        log = self.folder / f"{name}.log"
        program = self.programs[name] = Program(log, verb, *arguments, within=tuple(within), **environ)
        return program

    def until_up(self, **instances: int) -> None:
        """Ready, with so many instances in each pool that is named."""

        def up() -> bool:
            for name, program in self.programs.items():
                assert program.is_running(), f"{name}: {program.said()}"
            try:
                metrics = self.client.metrics()
            except OSError:  # the Conductor does not listen yet
                return False
            return self.client.ready() and all(
                metrics[f"dango:instances_up/{pool}"] == count for pool, count in instances.items()
            )

        until(up, READY_S)

    def kill(self, name: str, *, leave_memory: bool = False) -> None:
        """SIGKILL. What a pool leaves in /dev/shm goes too, or is left to its next life."""
        program = self.programs.pop(name)
        shared = shm_files(program.pid) if name.startswith("kvcache") and not leave_memory else set()
        program.kill()
        remove_shm(shared)

    def stop(self, *names: str) -> None:
        """In good order."""
        for name in names:
            assert self.programs.pop(name).stop() == 0

    def _same_model(self, model: Path | None = None) -> tuple[str, ...]:
        return ("--model", str(model or self.model), "--model-name", NAME, "--dtype", "float32")

    def _at(self, name: str) -> tuple[str, ...]:
        where = ("--listen", f"ipc://{self.folder}/{name}", "--conductor", self.control)
        return ("--instance", name, *where)
