"""One streamed answer over HTTP, as its client saw it: when each token came."""

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import aiohttp

REFUSED = 429
"""HTTP status of a refusal because of load."""

ANSWER_S_MAX = 600.0
"""The service's own deadline of a request, by default."""


class StreamFailed(Exception):
    """The service refused, or the stream did not end as it must; the text says how."""


class Refused(StreamFailed):
    """The service said that it will not serve this now; the text is its reason, in a word."""


@dataclass(frozen=True)
class Seen:
    """A whole answer. Times are the loop's, in seconds; `tokens_at` has at least one."""

    sent_at: float
    tokens_at: Sequence[float]
    prompt_tokens: int
    cached_tokens: int

    @property
    def ttft_s(self) -> float:
        """From sending to the first token."""
        return self.tokens_at[0] - self.sent_at

    @property
    def tpot_s(self) -> float | None:
        """Mean time between tokens; None for a single one."""
        if len(self.tokens_at) == 1:
            return None
        return (self.tokens_at[-1] - self.tokens_at[0]) / (len(self.tokens_at) - 1)


def session() -> aiohttp.ClientSession:
    """Connections without a limit of their own: the load decides how many there are."""
    timeout = aiohttp.ClientTimeout(total=ANSWER_S_MAX)
    return aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0))


async def stream_answer(
    http: aiohttp.ClientSession, url: str, prompt: Sequence[int], tokens: int, **more: object
) -> Seen:
    """Ask for exactly `tokens` tokens, greedily, after a prompt of token ids; `more` goes into the body.

    Raises Refused, or StreamFailed.
    """
    body = {
        "prompt": list(prompt),
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        **more,
    }
    clock = asyncio.get_running_loop().time
    data = json.dumps(body).encode()
    headers = {"Content-Type": "application/json"}
    lines: list[tuple[float, bytes]] = []
    sent_at = clock()
    try:
        async with http.post(f"{url}/v1/completions", data=data, headers=headers) as response:
            if response.status == REFUSED:
                raise Refused(_reason(await response.text()))
            if response.status != 200:
                raise StreamFailed(f"HTTP {response.status}: {(await response.text())[:200]}")
            async for line in response.content:
                lines.append((clock(), line))  # parsed afterwards: the client shares the machine
    except (aiohttp.ClientError, TimeoutError) as error:
        raise StreamFailed(f"{type(error).__name__}: {error}") from error
    return read_stream(sent_at, lines, tokens)


def _reason(text: str) -> str:
    """Of a refusal: its code, or else all that was said."""
    try:
        return str(json.loads(text)["error"]["code"])
    except (ValueError, KeyError, TypeError):
        return f"HTTP {REFUSED}: {text[:200]}"


def read_stream(sent_at: float, lines: Sequence[tuple[float, bytes]], tokens: int) -> Seen:
    """What the lines of a stream say, each with its time of arrival. Raises StreamFailed."""
    events = [(at, line.removeprefix(b"data: ").strip()) for at, line in lines if line.startswith(b"data: ")]
    if not events or events[-1][1] != b"[DONE]":
        raise StreamFailed("the stream broke off")
    tokens_at: list[float] = []
    usage: dict[str, Any] = {}
    for at, data in events[:-1]:
        match json.loads(data):
            case {"error": error}:
                raise StreamFailed(f"an error in the stream: {error}")
            case {"choices": [{"finish_reason": None}]}:
                tokens_at.append(at)
            case {"usage": dict() as usage}:
                pass
    if len(tokens_at) != tokens or usage.get("completion_tokens") != tokens:
        raise StreamFailed(f"{tokens} tokens wanted, {len(tokens_at)} events came; usage {usage}")
    return Seen(sent_at, tokens_at, usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"])


def steady_tpot_s(streams: Sequence[Seen]) -> float:
    """Mean time between tokens while all streams were running, the mean over the streams.

    Of a single stream simply its TPOT. Raises StreamFailed if they hardly ran together.
    """
    begin = max(seen.tokens_at[0] for seen in streams)
    end = min(seen.tokens_at[-1] for seen in streams)
    gaps = []
    for seen in streams:
        inside = [at for at in seen.tokens_at if begin <= at <= end]
        gaps.append([after - before for before, after in pairwise(inside)])
    if not all(gaps):
        raise StreamFailed("the streams did not run side by side")
    return sum(sum(own) / len(own) for own in gaps) / len(gaps)
