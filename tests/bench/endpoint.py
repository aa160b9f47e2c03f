"""An endpoint that streams made-up answers: what a load generator needs of a service, and its ways to fail."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

ANSWER_S = 0.02
"""How long an answer takes: so long that those to clients who ask at once overlap."""


def lines(tokens: int, prompt: int, cached: int = 0) -> list[bytes]:
    """The events of an answer of so many tokens, as the gateway writes them."""
    choices: list[dict[str, Any]] = [{"index": 0, "text": "x", "finish_reason": None} for _ in range(tokens)]
    events: list[dict[str, Any]] = [{"choices": [choice]} for choice in choices]
    events.append({"choices": [{"index": 0, "text": "", "finish_reason": "length"}]})
    usage = {
        "prompt_tokens": prompt,
        "completion_tokens": tokens,
        "prompt_tokens_details": {"cached_tokens": cached},
    }
    events.append({"choices": [], "usage": usage})
    return [b"data: " + json.dumps(event).encode() for event in events] + [b"data: [DONE]"]


class Endpoint:
    """Answers each request in full; the requests whose numbers are in `refused` with 429."""

    def __init__(self, refused: frozenset[int] = frozenset()) -> None:
        self.url = ""
        self.bodies: list[dict[str, Any]] = []
        self.open = 0
        self.open_most = 0
        self._refused = refused

    async def answer(self, http: web.Request) -> web.StreamResponse:
        number = len(self.bodies)
        self.bodies.append(await http.json())
        if number in self._refused:
            return web.Response(status=429, text="full")
        self.open += 1
        self.open_most = max(self.open_most, self.open)
        response = web.StreamResponse()
        await response.prepare(http)
        await asyncio.sleep(ANSWER_S)
        for line in lines(self.bodies[number]["max_tokens"], len(self.bodies[number]["prompt"])):
            await response.write(line + b"\n\n")
        self.open -= 1
        return response


@asynccontextmanager
async def an_endpoint(*refused: int) -> AsyncIterator[Endpoint]:
    endpoint, app = Endpoint(frozenset(refused)), web.Application()
    app.router.add_post("/v1/completions", endpoint.answer)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        endpoint.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        yield endpoint
    finally:
        await runner.cleanup()
