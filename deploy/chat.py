"""`dango chat`: a conversation with a running service, in the terminal."""

import argparse
import asyncio
import contextlib
import json
import os
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import aiohttp

ABOUT = """\
Talk with a running service (`dango serve`). Answers stream; the conversation is kept, so each turn reuses
the KV cache of the turns before it: the line after an answer tells how many tokens.
"""

HELP = """\
/new            forget the conversation
/system TEXT    give the model its role, and begin anew
/quit           end (so does Ctrl-D)
Ctrl-C          stop an answer"""

CONNECT_S = 5.0
"""A service that does not take a connection for this long is not there."""

SILENCE_S = 120.0
"""Between two pieces of an answer. A long prompt on a slow machine takes its time before the first."""

TEMPERATURE = 0.3
"""Small models wander at 1, which is the default of the HTTP interface."""


class ChatError(Exception):
    """The service refused or broke off; the text is for the user."""


class NobodyThere(ChatError):
    """Nothing answers at the address."""


@dataclass
class Conversation:
    """What was said. A turn that failed leaves no trace, so that the next one starts from a good state."""

    system: str = ""
    messages: list[dict[str, str]] = field(default_factory=list)

    def clear(self, system: str | None = None) -> None:
        """Begin anew; with another role if one is given."""
        self.system = self.system if system is None else system
        self.messages.clear()

    def asked(self, text: str) -> list[dict[str, str]]:
        """What to send for the next question."""
        role = [{"role": "system", "content": self.system}] if self.system else []
        return [*role, *self.messages, {"role": "user", "content": text}]

    def add(self, question: str, answer: str) -> None:
        """Keep a turn."""
        self.messages.append({"role": "user", "content": question})
        self.messages.append({"role": "assistant", "content": answer})


@dataclass
class Turn:
    """One answer, as far as it has come."""

    text: str = ""
    first_s: float | None = None
    total_s: float = 0.0
    usage: dict[str, Any] = field(default_factory=dict)

    def status(self) -> str:
        """One line: what the turn cost and what the cache saved."""
        parts = []
        if "prompt_tokens" in self.usage:
            cached = (self.usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
            parts.append(f"{self.usage['prompt_tokens']} prompt tokens, {cached} of them cached")
        if self.first_s is not None:
            parts.append(f"first token after {1000 * self.first_s:.0f} ms")
        made = self.usage.get("completion_tokens", 0)
        if made > 1 and self.first_s is not None and self.total_s > self.first_s:
            parts.append(f"{made} tokens, {(made - 1) / (self.total_s - self.first_s):.0f}/s")
        return " · ".join(parts)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Teach the parser what `dango chat` takes."""
    parser.description, parser.epilog = ABOUT, "in the conversation:\n" + HELP
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="the service (default: %(default)s)")
    parser.add_argument("--model", help="its name (default: the first that the service lists)")
    parser.add_argument("--system", default="", metavar="TEXT", help="the model's role")
    parser.add_argument(
        "--temperature",
        type=float,
        default=TEMPERATURE,
        metavar="X",
        help="0 is always the same answer, 1 is the model's own spread (default: %(default)s)",
    )
    parser.add_argument("--max-tokens", type=int, metavar="N", help="longest answer")


def chat(arguments: argparse.Namespace) -> int:
    """Talk until the input ends. Returns the exit code."""
    url = arguments.url.rstrip("/")
    options = {"temperature": arguments.temperature, "max_tokens": arguments.max_tokens}
    body = {name: value for name, value in options.items() if value is not None}
    conversation = Conversation(arguments.system)
    with asyncio.Runner() as runner:
        try:
            body["model"] = arguments.model or runner.run(_first_model(url))
            if sys.stdin.isatty():
                _prepare_line_editing()
                print(f"{body['model']} at {url}. /help for help.")
            while (line := _read_line()) is not None:
                if line.startswith("/"):
                    if not _command(line, conversation):
                        break
                elif line:
                    _turn(runner, url, body, conversation, line)
        except ChatError as error:
            print(f"dango: {error}", file=sys.stderr)
            return 1
        except KeyboardInterrupt:
            print()
    return 0


def _turn(runner: asyncio.Runner, url: str, body: dict[str, Any], conversation: Conversation, line: str) -> None:
    """One question and its answer. Raises NobodyThere."""
    turn = Turn()
    try:
        runner.run(_answer(url, {**body, "messages": conversation.asked(line)}, turn))
    except KeyboardInterrupt:  # the runner has cancelled the request: the service stops its work
        print(" [stopped]", end="")
    except NobodyThere:
        raise
    except ChatError as error:
        print(end="\n" if turn.text else "", flush=True)
        print(f"dango: {error}", file=sys.stderr)
        return
    print(flush=True)
    if turn.text:
        conversation.add(line, turn.text)
    if status := turn.status():
        _dim(status)


def _command(line: str, conversation: Conversation) -> bool:
    """Do what a line with a slash says. False: end."""
    verb, _, rest = line.partition(" ")
    match verb:
        case "/quit" | "/exit":
            return False
        case "/new":
            conversation.clear()
            _dim("a new conversation")
        case "/system":
            conversation.clear(rest.strip())
            _dim("a new conversation, with this role")
        case _:
            print(HELP)
    return True


async def _answer(url: str, body: dict[str, Any], turn: Turn) -> None:
    """Ask, and print the answer as it comes. Raises ChatError."""
    loop = asyncio.get_running_loop()
    started = loop.time()
    ask = {**body, "stream": True, "stream_options": {"include_usage": True}}
    async with (
        _session() as session,
        _talking(url),
        session.post(f"{url}/v1/chat/completions", json=ask) as response,
    ):
        if response.status != 200:
            raise ChatError(_refusal(await response.text(), response.status))
        async for line in response.content:
            if piece := _hear(line, turn):
                turn.first_s = turn.first_s or loop.time() - started
                turn.text += piece
                print(piece, end="", flush=True)
            turn.total_s = loop.time() - started


def _hear(line: bytes, turn: Turn) -> str:
    """The text that one line of the event stream adds to the answer. Raises ChatError."""
    data = line.removeprefix(b"data:").strip()
    if not line.startswith(b"data:") or data == b"[DONE]":
        return ""
    event = json.loads(data)
    if "error" in event:
        raise ChatError(_refusal(data.decode(), 200))
    turn.usage = event.get("usage") or turn.usage
    return "".join(choice.get("delta", {}).get("content") or "" for choice in event.get("choices", []))


async def _first_model(url: str) -> str:
    async with _session() as session, _talking(url), session.get(f"{url}/v1/models") as response:
        try:
            return str((await response.json())["data"][0]["id"])
        except (KeyError, IndexError, TypeError, aiohttp.ContentTypeError) as error:
            raise ChatError(f"what answers at {url} is no model service") from error


def _session() -> aiohttp.ClientSession:
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S, sock_read=SILENCE_S)
    return aiohttp.ClientSession(timeout=timeout)


@contextlib.asynccontextmanager
async def _talking(url: str) -> AsyncIterator[None]:
    """What goes wrong on the way becomes a sentence."""
    try:
        yield
    except (aiohttp.ClientConnectorError, aiohttp.InvalidURL) as error:
        raise NobodyThere(f"nothing answers at {url}. Start it with `dango serve`, or give --url.") from error
    except TimeoutError as error:
        raise ChatError(f"{url} was silent for {SILENCE_S:g} s") from error
    except (aiohttp.ClientError, ValueError) as error:
        raise ChatError(f"the answer broke off ({type(error).__name__}: {error})") from error


def _refusal(text: str, status: int) -> str:
    """The message in OpenAI's error object, or what there is."""
    try:
        match json.loads(text):
            case {"error": {"message": str(message)}}:
                return message
    except ValueError:
        pass
    return f"HTTP {status}: {text[:200]}"


def _read_line() -> str | None:
    """The next line of input; None at its end."""
    terminal = sys.stdin.isatty()
    try:
        return input("> " if terminal else "").strip()
    except EOFError:
        print(end="\n" if terminal else "")  # the shell's prompt would stand behind ours
        return None


def _prepare_line_editing() -> None:
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  (it changes what input() does; of use on a terminal only)


def _dim(text: str) -> None:
    """A side remark: to standard error, so that a pipe gets answers only."""
    plain = not sys.stderr.isatty() or "NO_COLOR" in os.environ
    print(text if plain else f"\x1b[2m{text}\x1b[0m", file=sys.stderr, flush=True)
