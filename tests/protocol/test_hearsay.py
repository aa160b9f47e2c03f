"""What an instance believes when its Conductors do not say the same."""

from protocol.hearsay import CONDUCTORS_MAX, Hearsay
from protocol.registry import DEAD_AFTER_REPORTS, REPORT_EVERY_S, Heard

A, B, C = "tcp://a:1", "tcp://b:1", "tcp://c:1"
DEAD_S = DEAD_AFTER_REPORTS * REPORT_EVERY_S


def says(*conductors: str, directory: str | None = "tcp://d:1", home: str | None = "kvcache-0") -> Heard:
    return Heard(True, directory, home, conductors=list(conductors))


def test_one_conductor_alone_is_believed_as_it_is() -> None:
    hearsay = Hearsay([A])
    assert hearsay.conductors(0.0) == [A]
    assert hearsay.hear(A, says(), 0.0) == says()
    assert hearsay.hear(A, says(directory=None, home=None), 1.0) == says(directory=None, home=None)
    assert hearsay.conductors(100.0) == [A]


def test_whom_one_names_is_reported_to_as_well() -> None:
    hearsay = Hearsay([B])
    hearsay.hear(B, says(A, B, C), 0.0)
    assert hearsay.conductors(0.0) == [B, A, C]


def test_a_newcomer_that_knows_nothing_takes_nothing_away() -> None:
    hearsay = Hearsay([A])
    hearsay.hear(A, says(A, B), 0.0)
    together = hearsay.hear(B, says(B, directory=None, home=None), 0.1)
    assert (together.directory, together.home) == ("tcp://d:1", "kvcache-0")
    assert hearsay.hear(A, says(A, B, directory=None, home=None), 0.2).directory is None, "now nobody says so"


def test_the_answering_conductor_sets_its_own_pace() -> None:
    hearsay = Hearsay([A])
    hearsay.hear(A, Heard(True, None, report_s=3.0, conductors=[A, B]), 0.0)
    assert hearsay.hear(B, Heard(True, None, report_s=0.5), 0.1).report_s == 0.5


def test_one_that_nobody_names_is_left_only_when_it_is_silent_too() -> None:
    hearsay = Hearsay([A])
    hearsay.hear(A, says(A, B), 0.0)
    hearsay.hear(B, says(A, B), 0.0)
    hearsay.hear(A, says(A), 1.0)  # such as when Redis has come back empty
    assert hearsay.conductors(1.0) == [A, B], "it answers"
    hearsay.hear(A, says(A), DEAD_S + 0.1)
    assert hearsay.conductors(DEAD_S + 0.1) == [A]


def test_while_nobody_answers_everybody_is_tried() -> None:
    hearsay = Hearsay([A])
    hearsay.hear(A, says(A, B), 0.0)
    hearsay.hear(B, says(A, B, C), 0.5)
    assert hearsay.conductors(1000.0) == [A, B, C]
    hearsay.hear(C, says(C), 1000.0)
    assert hearsay.conductors(1000.0) == [A, C], "the configured one is never given up"


def test_a_mad_conductor_cannot_name_more_than_fit() -> None:
    hearsay = Hearsay([A, A])
    hearsay.hear(A, says(*(f"tcp://x:{n}" for n in range(1000))), 0.0)
    assert len(hearsay.conductors(0.0)) == CONDUCTORS_MAX
    assert hearsay.conductors(0.0)[0] == A
