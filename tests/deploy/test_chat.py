"""`dango chat`, as a process with a pipe for a keyboard, against a service that speaks from a script."""

import asyncio
import json
import signal
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from deploy.chat import Conversation, Turn

ROOT = Path(__file__).resolve().parents[2]


@dataclass
class Scripted:
    """Answers each question with its number and length; records what it was asked."""

    url: str = ""
    asked: list[dict[str, Any]] = field(default_factory=list)
    hangs: bool = False
    left: asyncio.Event = field(default_factory=asyncio.Event)

    async def models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "scripted"}]})

    async def answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.asked.append(body)
        question = body["messages"][-1]["content"]
        if question == "too much":
            return web.json_response({"error": {"message": "prompt of 9000 tokens; 8192 fit"}}, status=400)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for piece in ("You said", f" {question}", "."):
            await self.send(response, {"choices": [{"delta": {"content": piece}}]})
        if question == "break":
            await self.send(response, {"error": {"message": "an instance died"}})
            return response
        if self.hangs:
            try:
                await asyncio.sleep(60)
            finally:
                self.left.set()
        usage = {
            "prompt_tokens": 40,
            "completion_tokens": 3,
            "prompt_tokens_details": {"cached_tokens": 32},
        }
        await self.send(response, {"choices": [], "usage": usage})
        await response.write(b": a comment\n\ndata: [DONE]\n\n")
        return response

    async def send(self, response: web.StreamResponse, event: dict[str, Any]) -> None:
        await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")


@pytest.fixture
async def scripted() -> AsyncIterator[Scripted]:
    service = Scripted()
    app = web.Application()
    app.add_routes([web.get("/v1/models", service.models), web.post("/v1/chat/completions", service.answer)])
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=1)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        service.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        yield service
    finally:
        await runner.cleanup()


async def start(*flags: str) -> asyncio.subprocess.Process:
    pipe = asyncio.subprocess.PIPE
    argv = [sys.executable, "-m", "deploy.cli", "chat", *flags]
    return await asyncio.create_subprocess_exec(*argv, cwd=ROOT, stdin=pipe, stdout=pipe, stderr=pipe)


async def chat(text: str, *flags: str) -> tuple[int | None, str, str]:
    """Exit code, answers, side remarks."""
    process = await start(*flags)
    try:
        async with asyncio.timeout(30):
            out, err = await process.communicate(text.encode())
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    return process.returncode, out.decode(), err.decode()


async def test_a_conversation_through_a_pipe(scripted: Scripted) -> None:
    flags = ("--url", scripted.url + "/", "--system", "Be brief.", "--temperature", "0", "--max-tokens", "9")
    code, out, err = await chat("one\n\ntwo\n", *flags)
    assert (code, out) == (0, "You said one.\nYou said two.\n")
    assert "40 prompt tokens, 32 of them cached · first token after" in err
    assert "\x1b" not in out + err
    first, second = scripted.asked
    assert (first["model"], first["stream"], first["temperature"], first["max_tokens"]) == ("scripted", True, 0, 9)
    assert [message["content"] for message in second["messages"]] == ["Be brief.", "one", "You said one.", "two"]


async def test_commands(scripted: Scripted) -> None:
    text = "one\n/new\ntwo\n/system Be a pirate.\nthree\n/what\n/quit\nfour\n"
    code, out, _ = await chat(text, "--url", scripted.url)
    assert code == 0
    said = [[message["content"] for message in body["messages"]] for body in scripted.asked]
    assert said == [["one"], ["two"], ["Be a pirate.", "three"]]
    assert "/system TEXT" in out


async def test_a_refused_or_broken_turn_is_told_and_forgotten(scripted: Scripted) -> None:
    code, out, err = await chat("too much\nbreak\none\n", "--url", scripted.url)
    assert code == 0
    assert "dango: prompt of 9000 tokens; 8192 fit" in err
    assert "dango: an instance died" in err
    assert out == "You said break.\nYou said one.\n"
    assert [message["content"] for message in scripted.asked[-1]["messages"]] == ["one"]


async def test_ctrl_c_stops_the_answer_and_not_the_chat(scripted: Scripted) -> None:
    scripted.hangs = True
    process = await start("--url", scripted.url)
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        async with asyncio.timeout(30):
            process.stdin.write(b"one\n")
            assert await process.stdout.readuntil(b".") == b"You said one."
            process.send_signal(signal.SIGINT)
            await scripted.left.wait()
            scripted.hangs = False
            process.stdin.write(b"two\n")
            process.stdin.close()
            assert await process.stdout.read() == b" [stopped]\nYou said two.\n"
            assert await process.wait() == 0
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()
    assert [message["content"] for message in scripted.asked[-1]["messages"]] == ["one", "You said one.", "two"]


async def test_nobody_there_is_told_with_the_remedy(unused_tcp_port_factory: Callable[[], int]) -> None:
    code, _, err = await chat("one\n", "--url", f"http://127.0.0.1:{unused_tcp_port_factory()}")
    assert code == 1
    assert "nothing answers at http://127.0.0.1:" in err
    assert "Start it with `dango serve`" in err
    assert "Traceback" not in err


async def test_what_is_no_model_service_is_told() -> None:
    app = web.Application()
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        code, _, err = await chat("one\n", "--url", f"http://127.0.0.1:{runner.addresses[0][1]}")
    finally:
        await runner.cleanup()
    assert code == 1
    assert "is no model service" in err


def test_the_status_says_what_is_known() -> None:
    assert Turn().status() == ""
    assert Turn(first_s=0.25).status() == "first token after 250 ms"
    turn = Turn(first_s=0.5, total_s=1.5, usage={"prompt_tokens": 9, "completion_tokens": 21})
    assert turn.status() == "9 prompt tokens, 0 of them cached · first token after 500 ms · 21 tokens, 20/s"


def test_a_conversation_keeps_its_role_when_it_begins_anew() -> None:
    conversation = Conversation("role")
    conversation.add("q", "a")
    conversation.clear()
    assert [message["content"] for message in conversation.asked("x")] == ["role", "x"]
    conversation.clear("")
    assert [message["content"] for message in conversation.asked("x")] == ["x"]
