"""A segment's side of its membership: it is there, notes what it hears, and brings what it noted."""

import asyncio
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

from kvcache_pool.api import (
    ANNOUNCE_EVERY_S,
    DIRECTORY_S,
    NOTES_MAX,
    Announce,
    Announced,
    Catalogue,
    Counted,
    Done,
    Goodbye,
    Note,
    Place,
    Tier,
)
from kvcache_pool.segment import Segment
from protocol.errors import BadMessage, DangoError
from protocol.rpc import Client
from protocol.transport import Transport

log = logging.getLogger("dango.kvcache")


def place_of(segment: Segment, address: str, host: str, tier: Tier = Tier.MEMORY) -> Place:
    """Where others find this segment."""
    geometry = segment.memory.geometry
    return Place(
        segment.segment,
        segment.incarnation,
        address,
        host,
        str(segment.path),
        geometry.slots,
        geometry.layout,
        tier,
    )


class Catalogued(Protocol):
    """What a segment tells of itself, and notes down."""

    draining: bool
    """What the directory has told last: whether the segment is drained."""

    @property
    def generation(self) -> int:
        """The highest that any of its slots has seen."""
        ...

    def note(self, note: Note) -> None:
        """Note down what a slot holds."""
        ...

    def noted(self) -> list[Note]:
        """What is noted down and still true, the first to be evicted first."""
        ...


async def announce(
    segment: Catalogued,
    place: Place,
    transport: Transport,
    directory: Callable[[], str | None],
    every_s: float = ANNOUNCE_EVERY_S,
) -> None:
    """Tell whichever directory there is that the segment is there, until cancelled; then say goodbye. To one that
    has not known it, tell what the segment holds."""
    client: Client | None = None
    noted = 0
    try:
        while True:
            address = directory()
            if client is not None and client.address != address:
                await client.aclose()
                client = None
            if client is None and address is not None:
                client = Client(transport, address).start()
            if client is not None:
                with _unreachable(client.address):
                    noted = await announce_once(client, segment, place, noted)
            await asyncio.sleep(every_s)
    finally:
        if client is not None:
            if client.address != place.address:  # our own directory ends with us
                await _say_goodbye(client, place)
            await client.aclose()


async def announce_once(client: Client, segment: Catalogued, place: Place, noted: int) -> int:
    """One announcement, and what its answer asks for; another at once, if the directory waits to hear that its
    news are noted. Returns the number of the last of these."""
    while True:
        announce = Announce(place, segment.generation, noted, segment.draining)
        answer = await client.call(announce, Announced, within_s=DIRECTORY_S)
        if answer.draining != segment.draining:
            log.info("%s is drained" if answer.draining else "%s is drained no more", place.segment)
            segment.draining = answer.draining
        if answer.joined:
            await _bring_catalogue(client, segment, place)
        try:
            for note in answer.news:
                segment.note(note)
        except ValueError as error:
            raise BadMessage(f"{client.address} tells news of another segment: {error}") from error
        noted = answer.number
        if not answer.more:
            return noted


async def _bring_catalogue(client: Client, segment: Catalogued, place: Place) -> None:
    notes = segment.noted()
    for start in range(0, max(1, len(notes)), NOTES_MAX):
        part, last = notes[start : start + NOTES_MAX], start + NOTES_MAX >= len(notes)
        await client.call(Catalogue(place.segment, place.incarnation, part, last), Counted, within_s=DIRECTORY_S)
        if not last:  # a long one must not look like silence
            await client.call(
                Announce(place, segment.generation, 0, segment.draining), Announced, within_s=DIRECTORY_S
            )


async def _say_goodbye(client: Client, place: Place) -> None:
    goodbye = Goodbye(place.segment, place.incarnation)
    try:
        await client.call(goodbye, Done, within_s=ANNOUNCE_EVERY_S)
    except DangoError as error:  # it ends at the same time, or notices our silence
        log.debug("left without a farewell: %s", error)


@contextmanager
def _unreachable(address: str) -> Iterator[None]:
    """The directory may be away: requests are then served cold, and the next announcement tries again."""
    try:
        yield
    except DangoError as error:
        log.warning("the directory at %s does not answer: %s", address, error)
