"""`dango kvcache VERB`: what an operator sees of a pool, and of one that is not there."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from kvcache_pool import operate
from kvcache_pool.api import Note
from kvcache_pool.client import KVCachePool
from kvcache_pool.operate import VERBS
from tests.kvcache_pool.builders import LAYOUT, Pool, a_pool, random_runs
from tests.kvcache_pool.test_client import MANIFEST, Conductor

ROOT = Path(__file__).resolve().parents[2]
TOKENS = [*range(40)]
"""Two full blocks and a tail."""


class Operator:
    """A terminal from which the pool is reached."""

    def __init__(self, conductor: str) -> None:
        self._conductor = conductor

    async def __call__(self, *arguments: str, says: str = "", **environ: str) -> tuple[int, str, str]:
        """Exit code, what it printed, and what it complained of."""
        return await self.run(sys.executable, "-m", "deploy.cli", "kvcache", *arguments, says=says, **environ)

    async def run(self, *argv: str, says: str = "", **environ: str) -> tuple[int, str, str]:
        """The same of any command line."""
        pipe = subprocess.PIPE
        env = os.environ | {"DANGO_KVCACHE_CONDUCTOR": self._conductor} | environ
        process = await asyncio.create_subprocess_exec(
            *argv, cwd=ROOT, env=env, stdin=pipe, stdout=pipe, stderr=pipe
        )
        try:
            out, err = await asyncio.wait_for(process.communicate(says.encode()), 60.0)
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        assert process.returncode is not None
        return process.returncode, out.decode(), err.decode()


@pytest.fixture
async def pool(tmp_path: Path) -> AsyncIterator[Pool]:
    """Two blocks of TOKENS are cached."""
    async with a_pool(tmp_path, 8) as pool:
        async with KVCachePool.connect(directory=pool.address, root=MANIFEST.root()) as client:
            await client.put(TOKENS, random_runs(2 * LAYOUT.layers))
        yield pool


@pytest.fixture
async def dango(pool: Pool) -> AsyncIterator[Operator]:
    async with Conductor(pool.transport, pool.address) as conductor:
        yield Operator(conductor.address)


def words(tokens: list[int]) -> list[str]:
    return [str(token) for token in tokens]


async def test_lookup_tells_how_much_is_cached_and_where(dango: Operator) -> None:
    code, out, err = await dango("lookup", *words(TOKENS))
    assert (code, out, err) == (0, "32 of 40 tokens are cached, 2 blocks\n  kv-0: 2 blocks\n", "")
    for says in (json.dumps(TOKENS), " ".join(words(TOKENS))):
        code, out, err = await dango("lookup", "-", "--json", says=says)
        told = {"tokens": 32, "blocks": 2, "segments": {"kv-0": 2}, "asked": 40}
        assert (code, json.loads(out), err) == (0, told, "")
    code, out, err = await dango("lookup", "--salt", "apart", *words(TOKENS))
    assert (code, out, err) == (0, "0 of 40 tokens are cached, 0 blocks\n", "")


async def test_stats_count_the_pool_and_each_segment(dango: Operator) -> None:
    code, out, err = await dango("stats")
    assert (code, err) == (0, "")
    assert "8 blocks of 16 tokens" in out
    assert "6 free, 2 cached, 0 being written" in out
    assert "kv-0 on here: 6 of 8 free, 2 cached" in out
    code, out, err = await dango("stats", "--json")
    told = json.loads(out)
    assert (code, told["cached"], told["total"], told["block_bytes"]) == (0, 2, 8, LAYOUT.block_bytes)
    assert [(one["segment"], one["free"]) for one in told["segments"]] == [("kv-0", 6)]


async def test_pins_removal_and_clearing_say_how_many_blocks(dango: Operator, pool: Pool) -> None:
    prompt = words(TOKENS)
    assert await dango("pin", "--hard", "--for-s", "60", *prompt) == (0, "2 blocks are pinned\n", "")
    assert await dango("unpin", *prompt) == (0, "2 blocks are unpinned\n", "")
    assert await dango("remove", *prompt[:16]) == (0, "1 block is forgotten\n", "")
    assert await dango("clear", "--json") == (0, '{"blocks": 1}\n', "")
    assert pool.index.stats().free == 8


async def test_a_pool_that_is_not_there_is_one_sentence_and_a_failure() -> None:
    async def told(verb: str) -> tuple[int, str, str]:
        tokens = ["1"] if verb not in ("stats", "clear", "check") else []
        tokens += ["--to", "kv-0"] if verb in ("copy", "move") else []
        return await Operator("tcp://127.0.0.1:2")(verb, *tokens, "--conductor", "tcp://127.0.0.1:1")

    answers = await asyncio.gather(*map(told, VERBS))
    for verb, answer in zip(VERBS, answers, strict=True):
        assert answer == (1, "", f"dango kvcache {verb}: nobody listens at tcp://127.0.0.1:1\n")


async def test_of_several_conductors_one_that_knows_the_directory_answers(dango: Operator, pool: Pool) -> None:
    async with Conductor(pool.transport, None) as newcomer, Conductor(pool.transport, pool.address) as other:
        some = f"tcp://127.0.0.1:1, {newcomer.address},{other.address}"
        code, out, err = await dango("lookup", "--conductor", some, *words(TOKENS))
        assert (code, err) == (0, "")
        assert out.startswith("32 of 40 tokens are cached")
        code, out, err = await dango("stats", "--conductor", f"tcp://127.0.0.1:1,{newcomer.address}")
    assert (code, out) == (1, "")
    unknowing = f"the Conductor at {newcomer.address} knows of no directory"
    assert err == f"dango kvcache stats: {unknowing}; nobody listens at tcp://127.0.0.1:1\n"
    code, _, err = await dango("stats", "--conductor", " , ")
    assert (code, err) == (1, "dango kvcache stats: conductor must name at least one address\n")


async def test_a_conductor_without_a_directory_is_one_sentence(pool: Pool) -> None:
    async with Conductor(pool.transport, None) as conductor:
        code, out, err = await Operator(conductor.address)("stats")
    assert (code, out) == (1, "")
    assert err == f"dango kvcache stats: the Conductor at {conductor.address} knows of no directory\n"


@pytest.mark.parametrize(
    ("arguments", "says", "code", "sentence"),
    [
        (("fly",), "", 2, "invalid choice: 'fly'"),
        (("lookup",), "", 2, "the following arguments are required: TOKEN"),
        (("lookup", "one"), "", 1, "a token is a whole number"),
        (("lookup", "-"), '{"tokens": 1}', 1, "a token is a whole number"),
        (("lookup", "4294967296"), "", 1, "a token id has 32 bits"),
        (("stats", "--config", "nowhere.toml"), "", 2, "cannot read the settings file nowhere.toml"),
    ],
)
async def test_a_mistake_is_told_and_changes_nothing(
    dango: Operator, pool: Pool, arguments: tuple[str, ...], says: str, code: int, sentence: str
) -> None:
    before = pool.index.stats()
    done, out, err = await dango(*arguments, says=says)
    assert (done, out) == (code, "")
    assert sentence in err
    assert "Traceback" not in err
    assert pool.index.stats() == before


async def test_a_mistyped_variable_is_told(dango: Operator) -> None:
    code, out, err = await dango("stats", DANGO_KVCACHE_CONDUKTOR="x")
    assert (code, out) == (2, "")
    assert "did you mean 'DANGO_KVCACHE_CONDUCTOR'?" in err


@pytest.mark.parametrize("verb", VERBS)
async def test_each_verb_explains_itself(verb: str) -> None:
    code, out, err = await Operator("")(verb, "--help")
    assert (code, err) == (0, "")
    assert f"usage: dango kvcache {verb}" in out
    assert "--conductor" in out
    assert "default:" in out


async def test_check_finds_nothing_wrong_in_a_sound_pool(dango: Operator, tmp_path: Path) -> None:
    code, out, _ = await dango("check", "--folder", str(tmp_path))
    assert (code, out) == (0, "kv-0: 2 blocks, 0 of them wrong\n")


async def test_check_names_each_wrong_block_and_fails(dango: Operator, pool: Pool, tmp_path: Path) -> None:
    name, _, grant = next(pool.index.named())
    pool.segments[0].memory.runs[grant.slot, 1, 0] ^= 1
    code, out, _ = await dango("check", "--folder", str(tmp_path), "--json")
    told = json.loads(out)
    assert (code, told["faults"]) == (1, 1)
    fault = told["segments"][0]["faults"][0]
    assert (fault["name"], fault["slot"]) == (name.hex(), grant.slot)
    assert "does not have its checksum" in fault["reason"]


async def test_check_says_which_segment_it_cannot_see(dango: Operator) -> None:
    code, out, _ = await dango("check")
    assert code == 0
    assert out == "kv-0: its file is not here: check it on its own host, as its user\n"


async def test_check_of_the_files_alone_needs_no_pool(dango: Operator, pool: Pool, tmp_path: Path) -> None:
    notes = [Note(grant.slot, grant.generation, name) for name, _, grant in pool.index.named()]
    for note in notes:
        pool.segments[0].note(note)
    nowhere = {"DANGO_KVCACHE_CONDUCTOR": f"ipc://{tmp_path}/nobody"}
    code, out, _ = await dango("check", "--offline", "--folder", str(tmp_path), **nowhere)
    assert code == 0
    assert "kv-0: 2 blocks, 0 of them wrong\n" in out
    pool.segments[0].memory.runs[notes[0].slot, 2, 9] ^= 4
    code, out, _ = await dango("check", "--offline", "--folder", str(tmp_path), **nowhere)
    assert code == 1
    assert f"  block {notes[0].name.hex()} in slot {notes[0].slot}" in out


async def test_check_fails_for_what_is_no_segment_and_where_there_is_none(tmp_path: Path) -> None:
    offline, nowhere = ("check", "--offline"), Operator("tcp://127.0.0.1:1")
    code, out, err = await nowhere(*offline, "--folder", f"{tmp_path}/none")
    assert (code, out, err) == (1, "", f"dango kvcache check: {tmp_path}/none is no folder\n")
    (tmp_path / f"dango-{os.getuid()}-broken").write_bytes(b"no segment" * 1000)
    code, out, err = await nowhere(*offline, "--folder", str(tmp_path))
    assert (code, err) == (1, "")
    assert "it is no segment of format" in out


async def test_an_address_that_is_none_is_one_sentence() -> None:
    for address in ("foo", "tcp://127.0.0.1", "http://127.0.0.1:8000"):
        answer = await Operator(address)("stats")
        assert answer == (1, "", f"dango kvcache stats: {address!r} is no address to connect to\n")


@pytest.mark.parametrize(
    ("shell", "code", "sentence"),
    [
        ("lookup - <&-", 1, "dango kvcache lookup: standard input is closed: there are no tokens to read\n"),
        ("stats >/dev/full", 1, "the answer cannot be written: [Errno 28] No space left on device\n"),
        ("stats >&-", 0, ""),
    ],
)
async def test_a_terminal_that_is_closed_or_full_is_no_traceback(
    dango: Operator, shell: str, code: int, sentence: str
) -> None:
    command = f"{sys.executable} -m deploy.cli kvcache {shell}"
    done, out, err = await dango.run("bash", "-c", command)
    assert (done, out) == (code, "")
    assert err.endswith(sentence)
    assert "Traceback" not in err


def test_ctrl_c_ends_the_wait_without_a_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    async def waits(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        await asyncio.sleep(60)

    monkeypatch.setattr(operate, "_run", waits)
    assert operate.main(["stats"]) == 130
