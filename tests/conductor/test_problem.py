"""Error objects."""

import math

import pytest

from conductor.ask import NO_LIMITS, Failed, Limits, Refusal
from conductor.problem import Outcome, failed, fault, invalid, overloaded, refused


def test_the_body_is_openais_error_object() -> None:
    problem = invalid("n: too large", "n")
    error = {"message": "n: too large", "type": "invalid_request_error", "param": "n", "code": "invalid_value"}
    assert (problem.status, problem.body(), problem.outcome) == (400, {"error": error}, Outcome.INVALID)


@pytest.mark.parametrize(
    ("after_s", "header"),
    [(0.0, "1"), (0.2, "1"), (1.0, "1"), (1.1, "2"), (30.0, "30"), (math.inf, "3600"), (-1.0, "1")],
)
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


@pytest.mark.parametrize(("status", "sent"), [(429, 503), (503, 503)])
def test_only_the_status_of_load_can_be_chosen(status: int, sent: int) -> None:
    assert refused(Refusal("queue_full", "later", 1.0, status), 503).status == sent
    assert refused(Refusal("no_decode", "none", 1.0, 503), 429).status == 503


@pytest.mark.parametrize(
    ("ttft_s", "tbt_s", "limits", "text"),
    [
        (None, None, None, "Later."),
        (41.24, None, Limits(30.0, 0.5), "Later. The first token is predicted after 41.2 s; the limit is 30 s."),
        (2.0, None, NO_LIMITS, "Later. The first token is predicted after 2 s."),
        (
            math.inf,
            0.7,
            Limits(30.0, 0.5),
            "Later. Each further token is predicted after 0.7 s; the limit is 0.5 s.",
        ),
    ],
)
def test_a_refusal_says_what_was_predicted_and_the_limit(
    ttft_s: float | None, tbt_s: float | None, limits: Limits | None, text: str
) -> None:
    assert str(refused(Refusal("ttft", "Later.", 1.0, 429, ttft_s, tbt_s, limits))) == text


def test_numbers_are_told_as_far_as_they_are_known() -> None:
    def told(refusal: Refusal) -> object:
        return refused(refusal).body()["error"]["dango"]

    assert told(Refusal("no_decode", "none", 0.5)) == {"reason": "no_decode", "retry_after_s": 0.5}
    assert told(Refusal("tbt", "Later.", 2.0, 429, math.inf, 0.71239, Limits(math.inf, 0.5))) == {
        "reason": "tbt",
        "predicted_tbt_s": 0.7124,
        "tbt_limit_s": 0.5,
        "retry_after_s": 2.0,
    }
    assert "dango" not in fault().body()["error"]


def test_our_own_troubles() -> None:
    assert (failed(Failed("died")).status, failed(Failed("died")).outcome) == (503, Outcome.FAILED)
    assert (fault().status, fault().outcome) == (500, Outcome.FAILED)
    full = refused(overloaded("full"))
    assert (full.status, full.outcome) == (429, Outcome.REFUSED)


def test_half_characters_of_a_client_can_be_sent_back() -> None:
    assert str(invalid("bad \ud800", "\udfff").body()).encode("utf-8")
