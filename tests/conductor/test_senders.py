"""Rates of senders: assumed, measured, fading."""

import pytest

from conductor.senders import DOUBT_BYTES, HALF_LIFE_S, TRANSFER_BYTES_S, Senders
from protocol.ids import SegmentId

HERE, THERE = SegmentId("kvcache-0"), SegmentId("kvcache-1")
MUCH = 100 * DOUBT_BYTES


def test_an_unknown_sender_is_taken_for_a_fast_one_so_that_it_is_tried() -> None:
    assert Senders().transfer_s(HERE, 2_000_000, 0) == pytest.approx(2_000_000 / TRANSFER_BYTES_S)


def test_bytes_under_way_come_first() -> None:
    senders = Senders()
    assert senders.transfer_s(HERE, 5, 15) == pytest.approx(senders.transfer_s(HERE, 20, 0))


def test_what_was_measured_is_of_its_sender_alone() -> None:
    senders = Senders()
    senders.learn(HERE, MUCH, MUCH / 1e8, now=0.0)
    assert senders.transfer_s(HERE, MUCH, 0) == pytest.approx(MUCH / 1e8, rel=0.02)
    assert senders.transfer_s(THERE, MUCH, 0) == pytest.approx(MUCH / TRANSFER_BYTES_S)


def test_a_small_transfer_is_not_believed_blindly() -> None:
    senders = Senders()
    senders.learn(HERE, 1000, 1.0, now=0.0)
    assert senders.transfer_s(HERE, 1000, 0) < 0.01


def test_the_latest_transfers_count_most() -> None:
    senders = Senders()
    for _ in range(20):
        senders.learn(HERE, MUCH, MUCH / 1e8, now=0.0)
    for _ in range(20):
        senders.learn(HERE, MUCH, MUCH / 1e9, now=0.0)
    assert senders.transfer_s(HERE, MUCH, 0) == pytest.approx(MUCH / 1e9, rel=0.15)


def test_a_sender_that_was_slow_once_is_tried_again() -> None:
    senders = Senders()
    senders.learn(HERE, MUCH, 1000.0, now=0.0)
    assert senders.transfer_s(HERE, MUCH, 0) > 900.0
    senders.now = 40 * HALF_LIFE_S
    assert senders.transfer_s(HERE, MUCH, 0) == pytest.approx(MUCH / TRANSFER_BYTES_S, rel=0.01)


def test_what_makes_no_sense_is_not_learned() -> None:
    senders = Senders()
    before = senders.transfer_s(HERE, MUCH, 0)
    for bytes_, seconds in ((0, 1.0), (MUCH, float("nan")), (MUCH, float("inf")), (MUCH, -1.0)):
        senders.learn(HERE, bytes_, seconds, now=0.0)
    assert senders.transfer_s(HERE, MUCH, 0) == before
