"""Chat templates: messages in, one prompt text out. The template comes with the model; the messages do not."""

import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from itertools import pairwise
from typing import Any, NoReturn

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Node, Scope
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

ROLES = ("system", "developer", "user", "assistant", "tool")
"""A role goes into the prompt as it is spelled, so only these may."""


class MessageError(ValueError):
    """A chat message of a shape that no template can be given. `field` says which one, as in the request."""

    def __init__(self, field: str, text: str) -> None:
        super().__init__(f"{field}: {text}")
        self.field = field


class TemplateError(ValueError):
    """The model's template could not, or would not, render these messages. The text is for the client."""


class NoChatTemplate(TemplateError):
    """The model was made without a chat template."""


class ChatTemplate:
    """One compiled template. Stateless after construction: threads may share it.

    The dialect is the one that Hugging Face models are written for: trimmed blocks, `break` and `continue`,
    `raise_exception`, `strftime_now`, a `tojson` that leaves HTML alone, and `generation` blocks. The sandbox
    denies everything else.
    """

    def __init__(self, source: str, names: Mapping[str, str]) -> None:
        """`names` are the spellings that templates know: `bos_token`, `eos_token` and so on.

        Raises TemplateError if the source is not a template.
        """
        self.source = source
        self._names = dict(names)
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise TemplateError(f"the model's chat template is broken in line {error.lineno}: {error}") from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt. Raises TemplateError when the template refuses or stumbles over the messages."""
        context = {**self._names, **(variables or {})}
        context |= {"messages": messages, "tools": tools, "documents": None}
        try:
            return self._template.render(context, add_generation_prompt=add_generation_prompt)
        except (
            jinja2.TemplateError,
            TypeError,
            ValueError,
            LookupError,
            AttributeError,
            ArithmeticError,
        ) as error:
            raise TemplateError(f"the model's chat template refused the messages: {error}") from error
        except RecursionError as error:
            raise TemplateError("the messages are nested too deeply for the model's chat template") from error


class _Generation(Extension):
    """`{% generation %}` marks what the assistant said, for training; here its body is simply rendered."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it so)

    def parse(self, parser: Parser) -> Node:
        line = next(parser.stream).lineno
        return Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(text: str) -> NoReturn:
    raise jinja2.TemplateError(text)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def normalise_messages(messages: Sequence[Any]) -> list[dict[str, Any]]:
    """Messages as templates expect them: every `content` a string, no null, tool arguments as objects.

    A list of text parts is joined without anything in between; `developer` becomes `system`. Raises MessageError.
    """
    return [_normalise_message(message, f"messages[{number}]") for number, message in enumerate(messages)]


def _normalise_message(message: Any, field: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise MessageError(field, "must be an object")
    role = message.get("role")
    if role not in ROLES:
        raise MessageError(f"{field}.role", f"must be one of {', '.join(ROLES)}")
    plain = {key: value for key, value in message.items() if value is not None}
    plain["role"] = "system" if role == "developer" else role
    plain["content"] = _normalise_content(message.get("content"), f"{field}.content")
    if not isinstance(plain.get("name", ""), str):
        raise MessageError(f"{field}.name", "must be a string")
    if "tool_calls" in plain:
        plain["tool_calls"] = _normalise_calls(plain["tool_calls"], f"{field}.tool_calls")
    return plain


def _normalise_content(content: Any, field: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise MessageError(field, "must be a string or a list of text parts")
    return "".join(_part_text(part, f"{field}[{number}]") for number, part in enumerate(content))


def _part_text(part: Any, field: str) -> str:
    if not isinstance(part, Mapping):
        raise MessageError(field, "must be an object with a type")
    if part.get("type") != "text":
        raise MessageError(f"{field}.type", f"must be 'text'; this model reads no {part.get('type')!r:.40}")
    if not isinstance(text := part.get("text"), str):
        raise MessageError(f"{field}.text", "must be a string")
    return text


def _normalise_calls(calls: Any, field: str) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        raise MessageError(field, "must be a list")
    return [_normalise_call(call, f"{field}[{number}]") for number, call in enumerate(calls)]


def _normalise_call(call: Any, field: str) -> dict[str, Any]:
    """Clients send a call's arguments as JSON text; templates write them as JSON, so they want the object."""
    if not isinstance(call, Mapping) or not isinstance(function := call.get("function"), Mapping):
        raise MessageError(f"{field}.function", "must be an object")
    if not isinstance(function.get("name"), str):
        raise MessageError(f"{field}.function.name", "must be a string")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            parsed = json.loads(arguments)
        except (ValueError, RecursionError):
            parsed = None
        arguments = parsed if isinstance(parsed, dict) else arguments
    return {**call, "function": {**function, "arguments": arguments}}


class Spellings:
    """The control tokens as text, and how to keep a client's text from spelling one.

    A spelling is broken by a mark, a character that occurs nowhere else, after its first character. A text that
    could become part of a spelling with what the template puts beside it gets a mark at that end. Who encodes
    the rendered prompt takes the marks out again, after the real control tokens have been found.
    """

    def __init__(self, spellings: Iterable[str]) -> None:
        self._whole = sorted({spelling for spelling in spellings if spelling})
        self._starts = {spelling[:cut] for spelling in self._whole for cut in range(1, len(spelling))}
        self._ends = {spelling[cut:] for spelling in self._whole for cut in range(1, len(spelling))}
        self._longest = max(map(len, self._whole), default=0)

    def break_all(self, value: Any, mark: str) -> Any:
        """A copy of `value` (strings, lists and objects) with every string broken. Equal if none needed it."""
        if isinstance(value, str):
            return self.break_text(value, mark)
        if isinstance(value, Mapping):
            return {self._break_key(key, mark): self.break_all(item, mark) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.break_all(item, mark) for item in value]
        return value

    def break_text(self, text: str, mark: str) -> str:
        """`text` with marks, so that it neither holds a spelling nor begins or ends one."""
        cuts = {at + 1 for spelling in self._whole for at in _occurrences(text, spelling)}
        # Templates trim, so it is the first and the last visible character that may come to lie at a border.
        inner = text.strip()
        begin = len(text) - len(text.lstrip())
        sizes = range(1, min(self._longest, len(inner) + 1))
        if any(inner[:size] in self._ends for size in sizes):
            cuts.add(begin)
        if any(inner[-size:] in self._starts for size in sizes):
            cuts.add(begin + len(inner))
        if not cuts:
            return text
        edges = [0, *sorted(cuts), len(text)]
        return mark.join(text[left:right] for left, right in pairwise(edges))

    def _break_key(self, key: Any, mark: str) -> Any:
        # Templates look fields up by name; a name they know holds no spelling and must stay as it is.
        return self.break_text(key, mark) if isinstance(key, str) and not key.isidentifier() else key


def _occurrences(text: str, spelling: str) -> Iterable[int]:
    at = text.find(spelling)
    while at >= 0:
        yield at
        at = text.find(spelling, at + 1)


def mark_for(*texts: str) -> str:
    """A character that occurs in none of the texts: first the ones that Unicode keeps for such a use.

    Raises TemplateError for a text that uses every such character.
    """
    used = set().union(*texts)
    for code in (*range(0xFDD0, 0xFDF0), *range(0xF0000, 0x10FFFE)):
        mark = chr(code)
        if mark not in used and not any(escaped(mark) in text for text in texts):
            return mark
    raise TemplateError("the messages use every private character of Unicode")


def escaped(mark: str) -> str:
    """The mark as a template writes it that asks for JSON in ASCII."""
    return json.dumps(mark)[1:-1]
