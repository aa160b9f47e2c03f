"""What a client is told when it does not get its answer: OpenAI's error object, and how the request is counted."""

import math
from enum import Enum
from typing import Any

from conductor.ask import NO_LIMITS, Failed, Refusal

FAILED_RETRY_S = 2
"""What failed a request is usually an instance that died: a supervisor has another in a few seconds."""

RETRY_S_MAX = 3600.0
"""A prediction beyond an hour is worth no more than its being long."""


class Outcome(Enum):
    """How a request ended. Each ends in exactly one."""

    FINISHED = "finished"
    REFUSED = "refused"
    CANCELLED = "cancelled"
    FAILED = "failed"
    INVALID = "invalid"


class Problem(Exception):
    """An HTTP status, OpenAI's error object and the headers that belong to it."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str,
    ) -> None:
        super().__init__(_unicode(message))
        self.status = status
        self.kind = kind
        self.param = None if param is None else _unicode(param)
        self.code = code
        self.outcome = Outcome.INVALID
        self.headers: dict[str, str] = {}
        self.numbers: dict[str, Any] = {}
        """What a refusal was judged by."""

    def body(self) -> dict[str, Any]:
        """The error object, as it is also sent within a stream; `dango` in it is ours."""
        error = {"message": str(self), "type": self.kind, "param": self.param, "code": self.code}
        return {"error": error | {"dango": self.numbers} if self.numbers else error}


def _unicode(text: str) -> str:
    """Clients can send half characters in names, which could not be sent back."""
    return text.encode("utf-8", "replace").decode("utf-8")


def invalid(message: str, param: str | None = None, code: str = "invalid_value") -> Problem:
    """The client's fault: 400, naming the field."""
    return Problem(400, message, param=param, code=code)


def refused(refusal: Refusal, busy_status: int = 429) -> Problem:
    """The Conductor's decision not to serve this now; `Retry-After` in whole seconds, at least one.

    `busy_status` is what a refusal because of load is answered with; one because nobody can serve is 503.
    """
    busy = refusal.status == 429
    retry_s = max(0.0, min(RETRY_S_MAX, refusal.retry_after_s))
    problem = Problem(
        busy_status if busy else refusal.status,
        " ".join([refusal.text, *_predictions(refusal)]),
        kind="overloaded_error" if busy else "service_unavailable",
        code=refusal.reason,
    )
    problem.outcome = Outcome.REFUSED
    problem.headers["Retry-After"] = str(max(1, math.ceil(retry_s)))
    problem.numbers = _numbers(refusal, retry_s)
    return problem


def _predictions(refusal: Refusal) -> list[str]:
    """A sentence for each latency that was predicted."""
    limits = refusal.limits or NO_LIMITS
    named = (
        ("The first token", refusal.ttft_s, limits.ttft_s),
        ("Each further token", refusal.tbt_s, limits.tbt_s),
    )
    return [
        f"{what} is predicted after {seconds:.3g} s"
        + (f"; the limit is {limit:.3g} s." if math.isfinite(limit) else ".")
        for what, seconds, limit in named
        if seconds is not None and math.isfinite(seconds)
    ]


def _numbers(refusal: Refusal, retry_s: float) -> dict[str, Any]:
    """For programs, in seconds; only what is known, and what JSON can write."""
    limits = refusal.limits or NO_LIMITS
    seconds = {
        "predicted_ttft_s": refusal.ttft_s,
        "predicted_tbt_s": refusal.tbt_s,
        "ttft_limit_s": limits.ttft_s,
        "tbt_limit_s": limits.tbt_s,
        "retry_after_s": retry_s,
    }
    known = {name: value for name, value in seconds.items() if value is not None and math.isfinite(value)}
    return {"reason": refusal.reason} | {name: float(f"{value:.4g}") for name, value in known.items()}


def failed(failure: Failed) -> Problem:
    """An accepted request that could not be finished."""
    problem = Problem(503, str(failure), kind="server_error", code="request_failed")
    problem.outcome = Outcome.FAILED
    problem.headers["Retry-After"] = str(FAILED_RETRY_S)
    return problem


def fault() -> Problem:
    """A mistake of ours. The log has the traceback; the client gets none of it."""
    problem = Problem(500, "The server made a mistake.", kind="server_error", code="internal_error")
    problem.outcome = Outcome.FAILED
    return problem


def overloaded(message: str) -> Refusal:
    """The edge itself is full."""
    return Refusal("queue_full", message, 1.0, status=429)
