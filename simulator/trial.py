"""One script played: a world, its clients, its faults, and the checks all the while."""

import asyncio
import gc
import hashlib
import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from conductor.ask import Ask, Failed, Refused
from protocol.frames import Buffer, decode
from protocol.ids import RequestId, token_ids
from protocol.registry import DEAD_AFTER_REPORTS, REPORT_EVERY_S
from simulator.checks import Ending, Told, check_always, check_rest, kv_of
from simulator.faults import CALM_S, LASTS_S, WITHIN_S, Client, Fault, Kind, Script, probe, script_of
from simulator.loop import run_virtual
from simulator.network import BREAK_S, Weather
from simulator.world import Member, World

CHECK_EVERY_S = 0.1
"""Virtual seconds between two looks at everything: as long as a few steps."""

SLOWER = 20.0
"""How many times as long a slow instance takes."""

NOTICED_S = BREAK_S + 2 * DEAD_AFTER_REPORTS * REPORT_EVERY_S
"""So long after the last fault whoever was hit by it has been given up, and has come back."""

CLOSE_S = 60.0
"""Every task must have ended so long after the world was closed: no deadline inside it is longer."""


@dataclass
class Result:
    """How a trial went."""

    seed: int
    broken: list[str] = field(default_factory=list)
    """Each truth that did not hold, in a sentence; empty if all is well."""
    endings: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0
    """Virtual ones."""
    messages: int = 0
    trace: str = ""
    """A hash over all messages, if they were recorded: equal for equal courses of events."""


class Trial:
    """Plays one script on the running virtual loop."""

    def __init__(self, script: Script, *, record: bool = False) -> None:
        self._script = script
        self._world = World(script.plan)
        if record:
            self._world.network.told = self._record
        self._told: list[Told] = []
        self._trace = hashlib.sha256()
        self.result = Result(script.seed)
        everything = [*script.clients, probe(0)]
        texts = [client.prompt + token_ids(answer) for client in everything for answer in client.expected]
        self._right = kv_of(self._world, texts)

    async def play(self) -> Result:
        """To the end. What is broken is in the result, not raised."""
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(self._unretrieved)
        with _Errors(self.result.broken):
            await self._play()
            gc.collect()  # a task whose exception nobody took says so when it is collected
            await asyncio.sleep(0)
        self.result.seconds, self.result.messages = loop.time(), self._world.network.messages
        self.result.endings = Counter(told.ending.value for told in self._told if told.ending is not None)
        self.result.trace = self._trace.hexdigest()
        return self.result

    async def _play(self) -> None:
        try:
            await self._world.start()
            watch = asyncio.create_task(self._look())
            played = [self._ask(client) for client in self._script.clients]
            await asyncio.gather(self._misfortunes(), *played)
            watch.cancel()
            await asyncio.gather(watch, return_exceptions=True)
            await asyncio.sleep(NOTICED_S)
            await self._rest()
            await self._ask(replace(probe(0), at_s=0.0))
            if self._told[-1].ending is not Ending.FINISHED:
                self._broken(f"a request after all faults is {self._told[-1].ending}: {self._told[-1].reason}")
            await self._rest()
        finally:
            await self._world.close()
        await self._quiet()

    def _broken(self, sentence: str) -> None:
        self.result.broken.append(f"{asyncio.get_running_loop().time():.3f} s: {sentence}")

    # --- clients

    async def _ask(self, client: Client) -> None:
        await asyncio.sleep(client.at_s)
        told, request = Told(client), RequestId(f"r{len(self._told)}")
        self._told.append(told)
        ask = Ask(
            request,
            client.prompt,
            client.samplings,
            within_s=WITHIN_S,
            priority=client.priority,
            limits=client.limits,
        )
        told.ending = await self._served(ask, told)
        try:
            told.check()
            if self._script.swift and told.admitted_times:
                assert "not finished" not in told.reason, told.reason
        except AssertionError as error:
            self._broken(f"{request}, {told.ending.value}: {error}")

    async def _served(self, ask: Ask, told: Told) -> Ending:
        if "conductor" not in self._world.members:
            return Ending.DIED
        task = self._world.serve(ask, told)
        done, _ = await asyncio.wait([task], timeout=told.client.leaves_after_s)
        left = not done
        if left:
            task.cancel()
            await asyncio.wait([task])
        if task.cancelled():
            return Ending.LEFT if left else Ending.DIED
        match task.exception():
            case None:
                return Ending.FINISHED
            case Refused() as refused:
                told.reason = refused.refusal.reason
                return Ending.REFUSED
            case Failed() as failed:
                told.reason = str(failed)
                return Ending.FAILED
            case error:
                self._broken(f"{ask.request} ended with {error!r}")
                return Ending.FAILED

    # --- faults

    async def _misfortunes(self) -> None:
        await asyncio.gather(*(self._befall(fault) for fault in self._script.faults), asyncio.sleep(LASTS_S))
        self._world.network.weather = Weather(self._script.plan.weather.delay_s)

    async def _befall(self, fault: Fault) -> None:
        await asyncio.sleep(fault.at_s)
        member = self._world.members.get(fault.name)
        if member is None or member.site.cut:
            return  # one misfortune at a time
        match fault.kind:
            case Kind.DEATH:
                await self._world.kill(fault.name)
                await asyncio.sleep(fault.for_s)
                self._world.revive(fault.name)
            case Kind.PARTITION:
                member.site.sever()
                await asyncio.sleep(fault.for_s)
                member.site.heal()
            case Kind.SLOWNESS:
                await self._slowed(member, fault.for_s)

    async def _slowed(self, member: Member, for_s: float) -> None:
        assert member.engine is not None
        cost = member.engine.cost
        prefill, step = cost.prefill, cost.step
        member.engine.cost = replace(
            cost,
            prefill=replace(prefill, base_s=prefill.base_s * SLOWER, token_s=prefill.token_s * SLOWER),
            step=replace(step, base_s=step.base_s * SLOWER, row_s=step.row_s * SLOWER),
        )
        await asyncio.sleep(for_s)
        member.engine.cost = self._script.plan.cost

    # --- truths

    async def _look(self) -> None:
        """Until cancelled, or until something is broken: what follows from that tells nothing new."""
        try:
            while True:
                await asyncio.sleep(CHECK_EVERY_S)
                check_always(self._world, self._right)
        except AssertionError as error:
            self._broken(_place_of(error))

    async def _rest(self) -> None:
        """Everything comes to rest, and is in order then."""
        loop = asyncio.get_running_loop()
        until = loop.time() + CALM_S
        while True:
            try:
                check_rest(self._world)
                check_always(self._world, self._right)
            except AssertionError as error:
                if loop.time() > until:
                    self._broken(f"no rest: {_place_of(error)}")
                    return
                await asyncio.sleep(1.0)
            else:
                return

    async def _quiet(self) -> None:
        """Of a closed world nothing goes on."""
        me, loop = asyncio.current_task(), asyncio.get_running_loop()
        until = loop.time() + CLOSE_S
        while left := [task for task in asyncio.all_tasks() if task is not me]:
            if loop.time() > until:
                self._broken(f"tasks that nobody ended: {sorted(map(str, left))}")
                return
            await asyncio.sleep(1.0)

    def _unretrieved(self, _: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        source = context.get("future", context.get("handle"))
        self._broken(f"{context['message']}: {context.get('exception')!r}: {source}")

    def _record(self, origin: str, to: str, frames: Sequence[Buffer]) -> None:
        header, _ = decode(frames)
        now = asyncio.get_running_loop().time()
        line = f"{now!r} {origin} {to} {header.kind} {header.call} {header.tag} {len(frames[0])}\n"
        self._trace.update(line.encode())


class _Errors(logging.Handler):
    """What a service logs as an error is a fault of ours: none of these is expected here."""

    def __init__(self, broken: list[str]) -> None:
        super().__init__(logging.ERROR)
        self._broken = broken

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        self._broken.append(f"{record.name}: {record.getMessage()}: {error!r}")

    def __enter__(self) -> "_Errors":
        logging.getLogger("dango").addHandler(self)
        return self

    def __exit__(self, *_: object) -> None:
        logging.getLogger("dango").removeHandler(self)


def try_seed(seed: int, *, record: bool = False) -> Result:
    """Play what this seed draws, on a loop of its own; `record` the messages if that is wanted."""

    async def main() -> Result:
        return await Trial(script_of(seed), record=record).play()

    gc.disable()  # each trial collects once, at its end
    try:
        return run_virtual(main())
    finally:
        gc.enable()


def _place_of(error: AssertionError) -> str:
    """What it says, and the line that said it."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    where = "" if trace is None else f" ({trace.tb_frame.f_code.co_qualname}, line {trace.tb_lineno})"
    return f"{error or 'an assertion failed'}{where}"
