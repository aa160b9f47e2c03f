"""Requests that arrive over time: the public traces, read and transformed; and how a prompt's token ids are made.

A transform takes a list of arrivals, sorted by time, and gives a new one; none changes what it was given.
"""

import json
import lzma
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from itertools import groupby
from pathlib import Path
from random import Random
from typing import IO

import numpy

from conductor.ask import Priority

BLOCK_TOKENS = 512
"""Tokens that one block id of a trace stands for: so the public traces were published."""

TRACES = ("conversation", "synthetic")
"""The traces in `simulator/traces`, by name."""

BLOCK_ID_LIMIT = 1 << 32
"""Ids are below this: a token id is made of each, and token ids have 32 bits."""


class BadTrace(ValueError):
    """A trace that cannot be read; the text names file and line."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request of a workload. Lengths in tokens."""

    at_s: float
    """From the start of the workload."""
    tokens: int
    """Of the prompt."""
    output: int
    """Of the answer; at least 1."""
    blocks: list[int]
    """One id for each block of the prompt, the last one perhaps for fewer. Equal ids: equal prefixes."""
    priority: Priority = Priority.INTERACTIVE


def prompt_ids(arrival: Arrival, block_tokens: int = BLOCK_TOKENS) -> "array[int]":
    """The prompt's token ids, uint32: a block id b makes `block_tokens` tokens b, the last one perhaps fewer.

    So two prompts have equal token ids exactly as far as they have equal blocks.
    """
    ids = array("I")
    repeated = numpy.repeat(numpy.array(arrival.blocks, dtype=numpy.uint32), block_tokens)
    ids.frombytes(repeated[: arrival.tokens].tobytes())
    return ids


def load_trace(name: str, block_tokens: int = BLOCK_TOKENS) -> list[Arrival]:
    """A trace by its name in TRACES, or from a JSONL file of the same shape (plain, or compressed as .xz), whose
    block ids stand for `block_tokens` tokens each.

    Raises BadTrace with file and line, or OSError.
    """
    if name in TRACES:
        with (files("simulator") / "traces" / f"{name}.jsonl.xz").open("rb") as packed, lzma.open(packed) as lines:
            return _read(lines, name, block_tokens)
    if not Path(name).is_file():
        raise BadTrace(f"{name}: no such file, and no such trace: there are {' and '.join(TRACES)}")
    with lzma.open(name) if name.endswith(".xz") else open(name, "rb") as lines:
        return _read(lines, name, block_tokens)


def _read(lines: IO[bytes], name: str, block_tokens: int) -> list[Arrival]:
    arrivals: list[Arrival] = []
    try:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                arrivals.append(_arrival(line, f"{name}:{number}", block_tokens))
                if len(arrivals) > 1 and arrivals[-1].at_s < arrivals[-2].at_s:
                    raise BadTrace(f"{name}:{number}: timestamp is before that of the line above")
    except (lzma.LZMAError, EOFError) as error:
        raise BadTrace(f"{name}: not readable as xz: {error}") from error
    if not arrivals:
        raise BadTrace(f"{name}: no request in it")
    return arrivals


def _arrival(line: bytes, where: str, block_tokens: int) -> Arrival:
    """One line of a trace. Raises BadTrace."""
    try:
        row = json.loads(line)
    except ValueError as error:  # also what is not UTF-8
        raise BadTrace(f"{where}: not JSON: {error}") from error
    if not isinstance(row, dict):
        raise BadTrace(f"{where}: not an object")
    for field in ("timestamp", "input_length", "output_length", "hash_ids"):
        if field not in row:
            raise BadTrace(f"{where}: {field} is missing")
    tokens = _whole(row, "input_length", where)
    output = _whole(row, "output_length", where)
    stamp, blocks = row["timestamp"], row["hash_ids"]
    if isinstance(stamp, bool) or not isinstance(stamp, int | float) or not 0 <= stamp < float("inf"):
        raise BadTrace(f"{where}: timestamp is not a number of milliseconds: {stamp!r}")
    if not isinstance(blocks, list) or not all(type(id_) is int and 0 <= id_ < BLOCK_ID_LIMIT for id_ in blocks):
        raise BadTrace(f"{where}: hash_ids is not a list of whole numbers from 0 to 2**32 - 1")
    wanted = _blocks(tokens, block_tokens)
    if len(blocks) != wanted:
        raise BadTrace(f"{where}: {len(blocks)} hash_ids for {tokens} tokens, not {wanted}")
    return Arrival(stamp / 1000, tokens, output, blocks)


def _whole(row: dict[str, object], field: str, where: str) -> int:
    value = row[field]
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise BadTrace(f"{where}: {field} is not a whole number of at least 1: {value!r}")
    return value


def _blocks(tokens: int, block_tokens: int) -> int:
    return -(-tokens // block_tokens)


def spread(arrivals: Sequence[Arrival], rng: Random) -> list[Arrival]:
    """Arrivals that tie, spread over the time to the next stamp; their order stays.

    Each of k gets a random moment inside its own k-th of that time. The last ones take the gap before them.
    """
    groups = [list(group) for _, group in groupby(arrivals, key=lambda arrival: arrival.at_s)]
    spread_out: list[Arrival] = []
    gap = 0.0
    for index, group in enumerate(groups):
        if index + 1 < len(groups):
            gap = groups[index + 1][0].at_s - group[0].at_s
        part = gap / len(group)
        spread_out += [replace(one, at_s=one.at_s + part * (n + rng.random())) for n, one in enumerate(group)]
    return spread_out


def sliced(
    arrivals: Sequence[Arrival],
    skip: int = 0,
    limit: int | None = None,
    since_s: float = 0.0,
    until_s: float = float("inf"),
) -> list[Arrival]:
    """Those from `since_s` to before `until_s`, less the first `skip`, at most `limit`; the first comes at 0."""
    chosen = [arrival for arrival in arrivals if since_s <= arrival.at_s < until_s][skip:]
    chosen = chosen if limit is None else chosen[:limit]
    return [replace(arrival, at_s=arrival.at_s - chosen[0].at_s) for arrival in chosen]


def thinned(arrivals: Iterable[Arrival], share: float, rng: Random) -> list[Arrival]:
    """Each request with probability `share`: the load falls, the shape of its bursts stays."""
    return [arrival for arrival in arrivals if rng.random() < share]


def sped(arrivals: Iterable[Arrival], factor: float) -> list[Arrival]:
    """The same requests in a `factor`-th of the time."""
    return [replace(arrival, at_s=arrival.at_s / factor) for arrival in arrivals]


def outputs_times(arrivals: Iterable[Arrival], factor: float, limit: int | None = None) -> list[Arrival]:
    """Answers `factor` times as long, then cut to `limit` tokens; at least 1."""
    ceiling = float("inf") if limit is None else limit
    return [replace(one, output=int(min(ceiling, max(1, round(one.output * factor))))) for one in arrivals]


def equal_prompts(
    arrivals: Sequence[Arrival], tokens: int, share: bool = False, block_tokens: int = BLOCK_TOKENS
) -> list[Arrival]:
    """Every prompt `tokens` long, as a control for rules that judge by length.

    Unless `share`, no block is ever seen twice: nothing can be reused, so every prompt costs the same prefill.
    With `share` a prompt keeps its first blocks, cut or filled up with its own: who shared a prefix still does,
    but the share of tokens that can be reused is another one, and prefills differ again.
    """
    count = _blocks(tokens, block_tokens)
    fresh = 1 + max((max(arrival.blocks) for arrival in arrivals), default=0)
    equal = []
    for arrival in arrivals:
        kept = arrival.blocks[:count] if share else []
        own = count - len(kept)
        equal.append(replace(arrival, tokens=tokens, blocks=[*kept, *range(fresh, fresh + own)]))
        fresh += own
    return equal


def share_of_batch(arrivals: Iterable[Arrival], share: float, rng: Random) -> list[Arrival]:
    """Each request with probability `share` of the class batch, else interactive."""
    classes = (Priority.INTERACTIVE, Priority.BATCH)
    return [replace(arrival, priority=classes[rng.random() < share]) for arrival in arrivals]
