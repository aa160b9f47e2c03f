"""Clients that leave, in every way and phase: the dispatcher's coroutine is cancelled, soon, and once."""

import asyncio
import json
from typing import Any

import pytest

from engine.tokenizer import Tokenizer
from tests.conductor.edge import Edge, an_edge
from tests.conductor.scripted import Play

SLOW = Play(first_s=30)
"""Nothing comes for as long as the test runs: the client leaves in the prefill."""

DRIP = Play(gap_s=0.01)
"""Tokens come and come: the client leaves while decoding."""


async def connect(edge: Edge, *, stream: bool) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    fields: dict[str, Any] = {"stream": stream, "ignore_eos": True}
    body = json.dumps({"messages": [{"role": "user", "content": "hi"}]} | fields).encode()
    head = "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json"
    reader, writer = await asyncio.open_connection("127.0.0.1", edge.port)
    writer.write(f"{head}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
    await edge.serve.busy()
    return reader, writer


async def count(edge: Edge, outcome: str) -> float:
    return await edge.metric(f'dango:requests_total{{model_name="tiny",outcome="{outcome}"}}')


@pytest.mark.parametrize("half", [False, True], ids=["closed", "half-closed"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("play", [SLOW, DRIP], ids=["in prefill", "in decode"])
async def test_a_client_that_leaves_cancels_its_request(
    tokenizer: Tokenizer, play: Play, stream: bool, half: bool
) -> None:
    async with an_edge(tokenizer, play) as edge:
        reader, writer = await connect(edge, stream=stream)
        if stream and play is DRIP:
            async with asyncio.timeout(3):
                await reader.readuntil(b"data: ")
        if half:
            writer.write_eof()
        else:
            writer.close()
        await edge.serve.idle(within_s=1.0)
        assert len(edge.serve.cancelled) == 1
        assert not edge.serve.finished
        sent = edge.serve.tokens_sent
        assert await count(edge, "cancelled") == 1
        assert await edge.metric('dango:requests_in_flight{model_name="tiny"}') == 0
        assert edge.serve.tokens_sent == sent
        writer.close()


async def test_a_reset_connection_cancels_too(tokenizer: Tokenizer) -> None:
    async with an_edge(tokenizer, DRIP) as edge:
        _, writer = await connect(edge, stream=True)
        writer.transport.abort()
        await edge.serve.idle(within_s=1.0)
        assert len(edge.serve.cancelled) == 1


async def test_leaving_ends_every_prompt_of_a_request(tokenizer: Tokenizer) -> None:
    async with an_edge(tokenizer, SLOW) as edge:
        waiting = asyncio.ensure_future(edge.complete(prompt=["a", "b", "c"], n=2))
        await edge.serve.busy()
        waiting.cancel()
        await edge.serve.idle(within_s=1.0)
        assert len(edge.serve.cancelled) == 3


async def test_a_client_that_is_gone_disturbs_no_other(tokenizer: Tokenizer) -> None:
    async with an_edge(tokenizer, DRIP) as edge:
        other = asyncio.ensure_future(edge.chat(max_tokens=20))
        _, writer = await connect(edge, stream=True)
        await edge.serve.busy(requests=2)  # the other's arrival is not this one's
        writer.close()
        status, answer = await other
        assert (status, answer["usage"]["completion_tokens"]) == (200, 20)
        await edge.serve.idle(within_s=1.0)
        assert (len(edge.serve.cancelled), len(edge.serve.finished)) == (1, 1)
