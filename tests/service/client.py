"""A client of the service over plain sockets: strict about every byte that it hears."""

import contextlib
import http.client
import json
import socket
import time
from collections.abc import Iterator, Sequence
from typing import Any
from urllib.parse import urlsplit

import openai
from prometheus_client.parser import text_string_to_metric_families

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
ANSWER_S = 60.0
REST_S = 20.0
REPORTS_S = 1.1
"""Longer than two reports of an instance: what was seen before is not older news."""

JSON = {"Content-Type": "application/json"}


class Client:
    """Talks with the service at `url`; each request has a connection of its own."""

    def __init__(self, url: str, model: str) -> None:
        address = urlsplit(url)
        assert address.hostname is not None
        assert address.port is not None
        self.url = url
        self.model = model
        self.address = (address.hostname, address.port)

    def openai(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=ANSWER_S)

    @contextlib.contextmanager
    def _asked(self, verb: str, path: str, body: bytes, headers: dict[str, str]) -> Iterator[Any]:
        connection = http.client.HTTPConnection(*self.address, timeout=ANSWER_S)
        try:
            connection.request(verb, path, body, headers)
            yield connection.getresponse()
        finally:
            connection.close()

    def post(self, path: str, body: bytes | dict[str, Any], headers: dict[str, str] = JSON) -> tuple[int, Any]:
        """Status and parsed answer."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        with self._asked("POST", path, data, headers) as response:
            return response.status, strict(response.read())

    def get(self, path: str) -> tuple[int, bytes]:
        with self._asked("GET", path, b"", {}) as response:
            return response.status, response.read()

    def ready(self) -> bool:
        return self.get("/ready")[0] == 200

    def complete(self, prompt: str | Sequence[int], tokens: int = 16, **fields: Any) -> dict[str, Any]:
        """A whole answer; greedy and through the end of a turn unless told otherwise."""
        status, answer = self.post(COMPLETIONS, self.body(prompt, tokens, **fields))
        assert status == 200, answer
        return answer  # type: ignore[no-any-return]

    def body(self, prompt: str | Sequence[int], tokens: int, **fields: Any) -> dict[str, Any]:
        plain = {"model": self.model, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
        return {"prompt": prompt if isinstance(prompt, str) else list(prompt), **plain, **fields}

    def chat(self, *messages: dict[str, Any], tokens: int = 1, **fields: Any) -> tuple[int, Any]:
        body = {"messages": messages, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
        return self.post(CHAT, {"model": self.model, **body, **fields})

    def streamed(self, prompt: str | Sequence[int], tokens: int = 16, **fields: Any) -> "Streamed":
        """The same, streamed to its end."""
        return Streamed(self.events(self.body(prompt, tokens, stream=True, **fields)))

    def events(self, body: dict[str, Any], path: str = COMPLETIONS) -> Iterator[Any]:
        """Ask now; then what the stream says, event by event, and its end mark as None. Asserts its form."""
        connection = http.client.HTTPConnection(*self.address, timeout=ANSWER_S)
        connection.request("POST", path, json.dumps(body).encode(), JSON)
        return self._heard(connection)

    def _heard(self, connection: http.client.HTTPConnection) -> Iterator[Any]:
        with contextlib.closing(connection), connection.getresponse() as response:
            assert response.status == 200, response.read()
            for line in response:
                text = line.decode("utf-8")
                if text == "\n" or text.startswith(":"):
                    continue
                assert text.startswith("data: "), text
                assert text.endswith("\n"), text
                yield None if text == "data: [DONE]\n" else strict(text[6:])

    def metrics(self) -> dict[str, float]:
        """Every sample, by its name and the values of its labels but the model's: `dango:blocks/decode/free`."""
        families = text_string_to_metric_families(self.get("/metrics")[1].decode())
        return {
            "/".join([sample.name, *(v for k, v in sample.labels.items() if k != "model_name")]): sample.value
            for family in families
            for sample in family.samples
        }

    def at_rest(self, within_s: float = REST_S) -> dict[str, float]:
        """The metrics, once nothing is under way and no block is held, and that has been so for two reports."""
        end, since = time.monotonic() + within_s, time.monotonic()
        while True:
            metrics = self.metrics()
            if any(metrics[name] for name in _busy(metrics)):
                since = time.monotonic()
            elif time.monotonic() - since > REPORTS_S:
                return metrics
            assert time.monotonic() < end, {name: metrics[name] for name in _busy(metrics) if metrics[name]}
            time.sleep(0.05)

    def connect(self, body: dict[str, Any]) -> socket.socket:
        """A socket over which the request has been sent."""
        data = json.dumps(body).encode()
        head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        connection = socket.create_connection(self.address, ANSWER_S)
        connection.sendall(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
        return connection


class Streamed:
    """A stream that was heard to its end: exactly one end mark, and exactly one reason a choice."""

    def __init__(self, events: Iterator[Any]) -> None:
        *self.chunks, end = events
        assert end is None
        assert None not in self.chunks
        self.usage = self.chunks.pop()["usage"] if not self.chunks[-1]["choices"] else None
        reasons = [chunk["choices"][0]["finish_reason"] for chunk in self.chunks]
        assert all(reason is None for reason in reasons[:-1])
        self.reason = reasons[-1]
        assert self.reason in ("stop", "length")
        self.text = "".join(chunk["choices"][0]["text"] for chunk in self.chunks)


def strict(text: str | bytes) -> Any:
    """Parsed JSON; NaN and infinities are none."""

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    return json.loads(text, parse_constant=refuse)


def text_of(answer: dict[str, Any]) -> str:
    return str(answer["choices"][0]["text"])


def cached(answer: dict[str, Any]) -> int:
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


def _busy(metrics: dict[str, float]) -> list[str]:
    held = [f"dango:blocks/{pool}/used" for pool in ("prefill", "decode")]
    held += [f"dango:blocks/{pool}/{state}" for pool in ("kvcache", "decode") for state in ("leased", "pending")]
    gauges = ["dango:requests_in_flight", "vllm:num_requests_running", "vllm:num_requests_waiting"]
    assert metrics.keys() >= {*held, *gauges}
    return held + gauges
