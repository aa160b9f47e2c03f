"""Error objects."""

import pytest

from conductor.ask import Failed, Refusal
from conductor.problem import Outcome, failed, fault, invalid, overloaded, refused


def test_the_body_is_openais_error_object() -> None:
    problem = invalid("n: too large", "n")
    error = {"message": "n: too large", "type": "invalid_request_error", "param": "n", "code": "invalid_value"}
    assert (problem.status, problem.body(), problem.outcome) == (400, {"error": error}, Outcome.INVALID)


@pytest.mark.parametrize(("after_s", "header"), [(0.0, "1"), (0.2, "1"), (1.0, "1"), (1.1, "2"), (30.0, "30")])
def test_retry_after_is_rounded_up_and_never_zero(after_s: float, header: str) -> None:
    assert refused(Refusal("no_decode", "none", after_s)).headers == {"Retry-After": header}


@pytest.mark.parametrize(("status", "kind"), [(429, "overloaded_error"), (503, "service_unavailable")])
def test_full_and_absent_are_told_apart(status: int, kind: str) -> None:
    problem = refused(Refusal("queue_full", "later", 1.0, status))
    assert (problem.status, problem.kind, problem.code, problem.outcome) == (
        status,
        kind,
        "queue_full",
        Outcome.REFUSED,
    )


def test_our_own_troubles() -> None:
    assert (failed(Failed("died")).status, failed(Failed("died")).outcome) == (503, Outcome.FAILED)
    assert (fault().status, fault().outcome) == (500, Outcome.FAILED)
    assert (overloaded("full").status, overloaded("full").outcome) == (429, Outcome.REFUSED)


def test_half_characters_of_a_client_can_be_sent_back() -> None:
    assert str(invalid("bad \ud800", "\udfff").body()).encode("utf-8")
