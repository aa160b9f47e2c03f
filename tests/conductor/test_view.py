"""What the Conductor believes: joining, being replaced, falling silent, homes, the ledger."""

from dataclasses import replace

import pytest

from conductor.health import FAILURES_MAX
from conductor.view import DEAD_MAX, DEAF_TIMES, Instance, Prefilling, Stream, View
from protocol.cluster import PROTOCOL_VERSION, Mismatch
from protocol.ids import Incarnation, InstanceId, RequestId, SegmentId
from protocol.registry import DEAD_AFTER_REPORTS, REPORT_EVERY_S, Load, Pool, Register, Superseded
from tests.fakes import LAYOUT, MANIFEST

DEAD_AFTER_S = DEAD_AFTER_REPORTS * REPORT_EVERY_S


def a_register(name: str, life: str = "1", host: str = "here", **more: object) -> Register:
    pool = Pool(name.split("-")[0])
    directory = name == "kvcache-0"
    message = Register(
        InstanceId(name), Incarnation(name + life), pool, f"tcp://{name}", host, MANIFEST, directory
    )
    return replace(message, **more)  # type: ignore[arg-type]


def a_view(*names: str, host: str = "here") -> View:
    view = View(MANIFEST)
    for name in names:
        view.register(a_register(name, host=host), 0.0)
    return view


def the(view: View, name: str) -> Instance:
    instance = view.find(InstanceId(name))
    assert instance is not None
    return instance


def test_a_new_life_replaces_the_old_which_is_then_refused():
    """B49: the newer incarnation wins, and the older cannot come back."""
    view = a_view("decode-0")
    old = view.register(a_register("decode-0", "2"), 1.0)
    assert old is not None
    assert old.incarnation == "decode-01"
    assert not view.report(InstanceId("decode-0"), Incarnation("decode-01"), Load(), 1.5)
    with pytest.raises(Superseded):
        view.register(a_register("decode-0", "1"), 2.0)
    assert the(view, "decode-0").incarnation == "decode-02"
    view.check()


def test_registering_again_in_the_same_life_is_no_replacement():
    view = a_view("decode-0")
    load, stream = Load(running=1, waiting=2, blocks_total=7), Stream(10, 0.0)
    assert view.report(InstanceId("decode-0"), Incarnation("decode-01"), load, 0.5)
    view.enter(the(view, "decode-0"), (RequestId("r"), 0), stream)
    assert view.register(a_register("decode-0"), 1.0) is None
    (again,) = view.of(Pool.DECODE)
    assert (again.load, again.foreign, list(again.streams.values())) == (load, 3, [stream])
    assert (again.heard_at, again.reported_at) == (1.0, 0.5), "it lives, and has said nothing new"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_digest": "other"}, ["model_digest", "'other'", "'model-digest'"]),
        ({"tokenizer_digest": "other"}, ["tokenizer_digest"]),
        ({"protocol_version": 99}, ["protocol_version", "99", str(PROTOCOL_VERSION)]),
        ({"layout": replace(LAYOUT, block_tokens=8)}, ["block_tokens", "8", "4"]),
        ({"layout": replace(LAYOUT, kv_type="float16")}, ["kv_type", "float16", "float32"]),
        ({"layout": replace(LAYOUT, layers=9)}, ["layers", "9", "3"]),
    ],
)
def test_a_misfit_is_refused_by_field_and_both_values(change: dict[str, object], words: list[str]):
    """B26."""
    view = a_view()
    with pytest.raises(Mismatch) as refused:
        view.register(a_register("prefill-0", manifest=replace(MANIFEST, **change)), 0.0)  # type: ignore[arg-type]
    assert all(word in str(refused.value) for word in words)
    assert view.of(Pool.PREFILL) == []


def test_silence_ends_an_instance_and_a_late_sign_of_life_lets_it_register_again():
    view = a_view("prefill-0", "decode-0")
    view.report(InstanceId("decode-0"), Incarnation("decode-01"), Load(), 2.0)
    assert [i.name for i in view.expire(DEAD_AFTER_S + 0.1)] == ["prefill-0"]
    assert not view.report(InstanceId("prefill-0"), Incarnation("prefill-01"), Load(), 4.0)
    view.register(a_register("prefill-0"), 4.0)
    assert view.expire(4.0) == []


def test_when_nobody_is_heard_of_nobody_is_given_up_and_all_get_time_to_be_heard_again():
    """B43 (a): membership freezes, and serving goes on with what is known."""
    view = a_view("prefill-0", "decode-0")
    assert view.expire(DEAF_TIMES * DEAD_AFTER_S) == []
    back_at = DEAF_TIMES * DEAD_AFTER_S + 0.1
    view.report(InstanceId("decode-0"), Incarnation("decode-01"), Load(), back_at)
    assert view.expire(back_at + DEAD_AFTER_S - 0.1) == []
    view.report(InstanceId("decode-0"), Incarnation("decode-01"), Load(), back_at + DEAD_AFTER_S - 0.1)
    assert [i.name for i in view.expire(back_at + DEAD_AFTER_S)] == ["prefill-0"]
    assert view.expire(2 * back_at + DEAD_AFTER_S) != [], "not for ever"


def test_an_instance_given_up_is_out_and_its_successor_is_not_touched():
    view = a_view("decode-0")
    old = the(view, "decode-0")
    view.register(a_register("decode-0", "2"), 1.0)
    view.give_up(old)
    assert the(view, "decode-0").incarnation == "decode-02"
    view.give_up(the(view, "decode-0"))
    assert view.of(Pool.DECODE) == []


def test_leaving_is_for_the_living_only():
    view = a_view("decode-0")
    assert view.leave(InstanceId("decode-0"), Incarnation("older")) is None
    assert view.leave(InstanceId("decode-0"), Incarnation("decode-01")) is not None
    assert view.leave(InstanceId("decode-0"), Incarnation("decode-01")) is None


def test_homes_are_on_the_own_host_and_dealt_out():
    view = a_view("kvcache-0", "kvcache-1", "prefill-0", "prefill-1", "prefill-2")
    assert [view.home(i) for i in view.of(Pool.PREFILL)] == ["kvcache-0", "kvcache-1", "kvcache-0"]
    view.register(a_register("kvcache-9", host="there"), 0.0)
    view.register(a_register("decode-0", host="there"), 0.0)
    assert view.home(the(view, "decode-0")) == "kvcache-9"


def test_without_a_segment_on_its_host_an_instance_is_at_home_elsewhere():
    view = a_view("kvcache-0")
    view.register(a_register("decode-0", host="there"), 0.0)
    assert view.home(the(view, "decode-0")) == "kvcache-0"
    assert a_view("decode-0").home(the(view, "decode-0")) is None


def test_what_is_drained_is_nobodys_home_while_there_is_another():
    view = a_view("kvcache-0", "kvcache-1", "prefill-0", "prefill-1")

    def report(name: str, draining: bool) -> list[str | None]:
        view.report(InstanceId(name), Incarnation(name + "1"), Load(draining=draining), 0.1)
        view.check()
        return [view.home(i) for i in view.of(Pool.PREFILL)]

    assert report("kvcache-1", False) == ["kvcache-0", "kvcache-1"]
    assert report("kvcache-1", True) == ["kvcache-0", "kvcache-0"]
    assert report("kvcache-0", True) == ["kvcache-0", "kvcache-1"], "rather that than nowhere"
    assert report("kvcache-1", False) == ["kvcache-1", "kvcache-1"]
    view.register(a_register("kvcache-2", host="there"), 0.2)
    assert report("kvcache-1", True) == ["kvcache-2", "kvcache-2"], "another host is better than a drained segment"


def test_homes_follow_whoever_joins_or_goes():
    view = a_view("kvcache-0", "kvcache-1", "prefill-0", "prefill-1")
    second = the(view, "prefill-1")
    assert view.home(second) == "kvcache-1"
    view.leave(InstanceId("prefill-0"), Incarnation("prefill-01"))
    assert view.home(second) == "kvcache-0"
    view.register(a_register("prefill-0", "2"), 0.0)
    assert view.home(second) == "kvcache-1"
    view.give_up(the(view, "kvcache-1"))
    assert view.home(second) == "kvcache-0"
    for now in (2.0, 4.0):
        view.report(InstanceId("prefill-1"), Incarnation("prefill-11"), Load(), now)
    view.expire(4.0)
    assert view.home(second) is None
    view.check()


def test_work_goes_to_those_who_are_well_and_did_not_fail_this_request():
    view = a_view("decode-0", "decode-1", "decode-2")

    def able(*avoid: str) -> list[str]:
        return [i.name for i in view.able(Pool.DECODE, 0.0, [Incarnation(life) for life in avoid])]

    assert able() == able("decode-01") == ["decode-0", "decode-1", "decode-2"], (
        "nobody has failed, or all is forgiven"
    )
    for _ in range(FAILURES_MAX):
        view.health.failed(Incarnation("decode-01"), 0.0, 0.0)
    assert able() == ["decode-1", "decode-2"]
    assert able("decode-11") == ["decode-2"]
    assert able("decode-11", "decode-21") == ["decode-1", "decode-2"], "rather than the ejected one"
    for life in ("decode-11", "decode-21") * FAILURES_MAX:
        view.health.failed(Incarnation(life), 0.0, 0.0)
    assert able() == ["decode-0", "decode-1", "decode-2"]
    assert able("decode-21") == ["decode-0", "decode-1"]


def test_bytes_on_their_way_are_counted_by_the_segment_that_sends_them():
    view = a_view("kvcache-0", "kvcache-1")
    view.send(SegmentId("kvcache-0"), 100)
    view.send(SegmentId("kvcache-0"), 50)
    view.send(SegmentId("kvcache-1"), 7)
    view.sent(SegmentId("kvcache-0"), 100)
    view.check()
    assert view.sending == {"kvcache-0": 50, "kvcache-1": 7}
    view.sent(SegmentId("kvcache-0"), 50)
    view.sent(SegmentId("kvcache-1"), 7)
    assert view.sending == {}


def test_what_is_missing_is_named():
    assert a_view("kvcache-0", "prefill-0", "decode-0").missing() == []
    assert a_view("prefill-0").missing() == [
        "no kvcache instance is alive",
        "no decode instance is alive",
    ]
    assert a_view("kvcache-1", "prefill-0", "decode-0").missing() == ["no kvcache instance keeps the directory"]


def test_the_ledger_counts_tokens_until_they_are_released():
    view = a_view("decode-0")
    instance = the(view, "decode-0")
    first, second = (RequestId("a"), 0), (RequestId("a"), 1)
    view.enter(instance, first, Stream(100, due_at=1.0))
    view.enter(instance, second, Stream(50, due_at=1.0))
    view.joined(instance, first, 2.0)
    view.said(instance, first, 3, 2.5)
    assert instance.streams[first] == Stream(100, 1.0, joined_at=2.0, said=3, said_at=2.5)
    view.release(instance, first, 3.0)
    view.release(instance, first, 3.0)
    view.said(instance, first, 1, 3.5)
    assert list(instance.streams) == [second]


def test_the_next_step_is_longer_for_a_rest_until_its_last_part_is_under_way():
    view = a_view("decode-0")
    instance, key = the(view, "decode-0"), (RequestId("a"), 0)
    view.enter(instance, key, Stream(100, due_at=3.0, rest_s=0.25))
    assert (instance.computes_rest, instance.next_rest_s(0.5, 2.0)) == (True, 0.0)
    view.joined(instance, key, 2.0)
    assert [instance.next_rest_s(0.5, now) for now in (2.0, 2.2, 2.3)] == [0.25, 0.25, 0.0]
    view.said(instance, key, 1, 2.1)
    assert (instance.computes_rest, instance.next_rest_s(0.5, 2.1)) == (False, 0.0)


def test_a_queue_shrinks_as_the_clock_runs_and_not_below_what_waits_behind_the_first():
    view = a_view("prefill-0")
    instance = the(view, "prefill-0")
    first, second = (RequestId("a"), 0), (RequestId("b"), 0)
    assert instance.queue_s(0.0) == 0.0
    view.enter(instance, first, Prefilling(100, 0, seconds=2.0, since=0.0))
    view.enter(instance, second, Prefilling(50, 0, seconds=1.0, since=0.5))
    assert instance.queue_s(0.5) == pytest.approx(2.5)
    assert instance.queue_s(9.0) == pytest.approx(1.0)
    view.release(instance, first, 3.0)
    assert instance.queue_s(3.25) == pytest.approx(0.75)


def test_the_memory_of_ended_lives_is_bounded():
    view = a_view()
    for life in range(DEAD_MAX + 20):
        view.register(a_register("decode-0", str(life)), 0.0)
    assert len(view._ended) == DEAD_MAX


def test_a_name_belongs_to_one_pool_and_the_directory_to_one_instance():
    view = a_view("decode-0", "kvcache-0")
    with pytest.raises(Mismatch, match="belongs to a decode instance"):
        view.register(a_register("prefill-0", "9", instance=InstanceId("decode-0")), 0.0)
    with pytest.raises(Mismatch, match="kvcache-0 keeps the directory"):
        view.register(a_register("kvcache-1", directory=True), 0.0)
    assert [i.name for i in view.of(Pool.DECODE)] == ["decode-0"]
    view.register(a_register("kvcache-0", "2", directory=True), 1.0)  # its own next life may
    view.check()


def test_what_a_decode_instance_does_beyond_the_ledger_is_foreign():
    """As after a restart of the Conductor: its instances go on with requests that it does not know."""
    view = a_view("decode-0")
    instance = the(view, "decode-0")
    view.enter(instance, (RequestId("ours"), 0), Stream(10, 0.0))
    for running, waiting, foreign in ((0, 0, 0), (1, 0, 0), (3, 1, 3)):
        assert view.report(instance.name, instance.incarnation, Load(running=running, waiting=waiting), 1.0)
        assert instance.foreign == foreign
    view.release(instance, (RequestId("ours"), 0), 1.1)
    assert instance.foreign == 3, "it is a matter of the report, not of what has ended since"
