"""Who shares the cluster, when Redis speaks, is silent, and comes back with nothing; what is written there."""

import json
from dataclasses import replace

import pytest

from conductor.roster import Roster, digest_of, of_text, present_of, registrations, to_text
from conductor.view import DEAD_MAX
from protocol.cluster import Manifest
from protocol.errors import BadMessage
from protocol.ids import Incarnation
from tests.conductor.test_view import a_view, the
from tests.fakes import MANIFEST

A, B, C = "tcp://a:1", "tcp://b:1", "tcp://c:1"
OTHER = replace(MANIFEST, model_digest="another")


def test_alone_there_are_no_conductors_to_tell_of() -> None:
    assert Roster().conductors == []
    assert Roster(A).conductors == [A]


def test_those_in_redis_are_there_and_those_that_expired_are_not() -> None:
    roster = Roster(A, patience_s=3.0)
    roster.hear([A, C, B], 0.0)
    assert roster.conductors == [A, B, C]
    roster.hear([A, C], 0.5)
    assert roster.conductors == [A, C]
    roster.hear([], 1.0)
    assert roster.conductors == [A], "oneself is there whatever Redis says"


def test_silence_freezes_what_is_known_and_says_why() -> None:
    roster = Roster(A, patience_s=3.0)
    roster.hear([A, B], 0.0)
    roster.silence("it hangs")
    assert (roster.fault, roster.conductors) == ("it hangs", [A, B])


def test_a_redis_that_comes_back_empty_strikes_nobody_off_at_once() -> None:
    roster = Roster(A, patience_s=3.0)
    roster.hear([A, B, C], 0.0)
    roster.silence("it died")
    roster.hear([A], 1000.0)
    assert (roster.fault, roster.conductors) == ("", [A, B, C])
    roster.hear([A, C], 1000.5)
    assert roster.conductors == [A, B, C], "patience holds after one has come back"
    roster.hear([A, C], 1003.0)
    assert roster.conductors == [A, C], "and has an end"


def test_ended_lives_are_told_until_they_are_written_and_then_no_more() -> None:
    roster = Roster(A)
    roster.end(Incarnation("one"))
    told = roster.tell()
    roster.end(Incarnation("two"))
    roster.told(told)
    assert roster.tell() == ["two"]
    for n in range(2 * DEAD_MAX):
        roster.end(Incarnation(str(n)))
    assert len(roster.tell()) == DEAD_MAX


def test_what_is_written_of_ended_lives_is_news_once() -> None:
    roster = Roster(A)
    assert roster.learn([Incarnation("two"), Incarnation("one"), Incarnation("one")]) == ["one", "two"]
    assert roster.learn([Incarnation("one"), Incarnation("two")]) == []
    assert roster.learn([Incarnation("two"), Incarnation("three")]) == ["three"]


def test_a_manifest_survives_the_way_through_redis() -> None:
    assert of_text(Manifest, to_text(MANIFEST)) == MANIFEST
    assert digest_of(MANIFEST) == digest_of(of_text(Manifest, to_text(MANIFEST))) != digest_of(OTHER)


@pytest.mark.parametrize("text", ["", "{", "[1]", "null", '{"model": 1}', "9" * 5000, "[" * 100_000])
def test_what_is_no_manifest_is_a_bad_message(text: str) -> None:
    with pytest.raises(BadMessage):
        of_text(Manifest, text)


def test_what_another_wrote_of_an_instance_is_what_it_would_say_itself() -> None:
    view = a_view("decode-0", "kvcache-0")
    instances = [the(view, "decode-0"), the(view, "kvcache-0")]
    texts = {i.name: to_text(present_of(i, digest_of(MANIFEST))) for i in instances}
    second = a_view()
    for message in registrations(texts, MANIFEST):
        second.register(message, 0.0)
    for instance in instances:
        copy = the(second, instance.name)
        assert present_of(copy, "") == present_of(instance, "")
    assert second.directory == view.directory


def test_what_was_written_of_others_is_left_out() -> None:
    present = present_of(the(a_view("decode-0"), "decode-0"), digest_of(MANIFEST))
    entry = json.loads(to_text(present))
    texts = {
        "decode-0": to_text(replace(present, manifest=digest_of(OTHER))),
        "decode-1": to_text(present),  # under a name that is not its own
        "decode-2": json.dumps(entry | {"instance": "decode-2", "pool": "kitchen"}),
        "decode-3": "garbage",
        "decode-4": json.dumps(entry | {"instance": "decode-4"}),
    }
    assert [message.instance for message in registrations(texts, MANIFEST)] == ["decode-4"]
