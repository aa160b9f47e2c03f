"""A gateway on a real socket, and small ways to talk to it: JSON, raw bytes, events."""

import asyncio
import json
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
import openai
from aiohttp import web

from conductor.config import ConductorConfig
from conductor.gateway import Gateway
from conductor.metrics import Metrics
from engine.tokenizer import Tokenizer
from protocol.blocks import BlockLayout
from protocol.cluster import Manifest
from tests.conductor.scripted import Play, Scripted

CONTEXT = 128
MODEL = "tiny"


@dataclass
class Edge:
    """A running gateway with what stands behind it."""

    serve: Scripted
    tokenizer: Tokenizer
    metrics: Metrics
    port: int
    http: aiohttp.ClientSession

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def client(self) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=10)

    def ids(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, special=True)

    async def post(self, path: str, body: Any, **headers: str) -> tuple[int, Any]:
        """Status and JSON of an answer."""
        async with self.http.post(self.url + path, json=body, headers=headers) as response:
            return response.status, await response.json()

    async def chat(self, **fields: Any) -> tuple[int, Any]:
        return await self.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]} | fields)

    async def complete(self, **fields: Any) -> tuple[int, Any]:
        return await self.post("/v1/completions", {"prompt": "hi"} | fields)

    async def events(self, path: str, body: Any) -> list[str]:
        """The payloads of a whole stream's events, strictly decoded; comments left out."""
        async with self.http.post(self.url + path, json=body | {"stream": True}) as response:
            assert response.status == 200
            text = (await response.read()).decode("utf-8", "strict")
        assert text.endswith("\n\n")
        blocks = text.split("\n\n")[:-1]
        assert all(block.startswith(("data: ", ": ")) and "\n" not in block for block in blocks)
        return [block.removeprefix("data: ") for block in blocks if block.startswith("data: ")]

    async def chat_events(self, **fields: Any) -> list[str]:
        return await self.events(
            "/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]} | fields
        )

    async def raw(self, data: bytes, *, read: bool = True) -> bytes:
        """What comes back for these bytes, until the server closes or has sent one whole response."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            writer.write(data)
            await writer.drain()
            async with asyncio.timeout(5):
                return await reader.read() if read else b""
        finally:
            writer.close()

    async def metric(self, name: str) -> float:
        """The value of one series, such as `dango:requests_in_flight{model_name="tiny"}`."""
        async with self.http.get(self.url + "/metrics") as response:
            lines = (await response.text()).splitlines()
        return next(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name + " "))


@asynccontextmanager
async def an_edge(tokenizer: Tokenizer, play: Play | None = None, **config: Any) -> AsyncIterator[Edge]:
    """A gateway over a scripted dispatcher, on any free port."""
    layout = BlockLayout(layers=3, kv_heads=2, head_dim=16, block_tokens=16, kv_type="float32")
    manifest = Manifest(MODEL, "m", tokenizer.digest(), CONTEXT, layout)
    async with an_edge_over(Scripted(play or Play()), tokenizer, manifest, Metrics(MODEL), **config) as edge:
        yield edge


@asynccontextmanager
async def an_edge_over(
    serve: Any, tokenizer: Tokenizer, manifest: Manifest, metrics: Metrics, **config: Any
) -> AsyncIterator[Edge]:
    """A gateway over any dispatcher."""
    gateway = Gateway(serve, tokenizer, manifest, metrics, ConductorConfig(**config), random.Random(7))
    runner = gateway.runner()
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    try:
        async with aiohttp.ClientSession() as http:
            yield Edge(serve, tokenizer, metrics, port, http)
    finally:
        await runner.cleanup()


def texts(events: list[str]) -> str:
    """All text of a chat stream's first choice."""
    assert events[-1] == "[DONE]"
    chunks = [json.loads(event) for event in events[:-1]]
    return "".join(choice["delta"].get("content", "") for chunk in chunks for choice in chunk["choices"])


def deltas(events: list[str]) -> list[dict[str, Any]]:
    """The choices of a stream's chunks, in order."""
    return [choice for event in events if event != "[DONE]" for choice in json.loads(event).get("choices", [])]
