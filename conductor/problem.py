"""What a client is told when it does not get its answer: OpenAI's error object, and how the request is counted."""

import math
from enum import Enum
from typing import Any

from conductor.ask import Failed, Refusal

FAILED_RETRY_S = 2
"""What failed a request is usually an instance that died: a supervisor has another in a few seconds."""


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

    def body(self) -> dict[str, Any]:
        """The error object, as it is also sent within a stream."""
        return {"error": {"message": str(self), "type": self.kind, "param": self.param, "code": self.code}}


def _unicode(text: str) -> str:
    """Clients can send half characters in names, which could not be sent back."""
    return text.encode("utf-8", "replace").decode("utf-8")


def invalid(message: str, param: str | None = None, code: str = "invalid_value") -> Problem:
    """The client's fault: 400, naming the field."""
    return Problem(400, message, param=param, code=code)


def refused(refusal: Refusal) -> Problem:
    """The Conductor's decision not to serve this now; `Retry-After` in whole seconds, at least one."""
    kind = "overloaded_error" if refusal.status == 429 else "service_unavailable"
    problem = Problem(refusal.status, refusal.text, kind=kind, code=refusal.reason)
    problem.outcome = Outcome.REFUSED
    problem.headers["Retry-After"] = str(max(1, math.ceil(refusal.retry_after_s)))
    return problem


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


def overloaded(message: str) -> Problem:
    """The edge itself is full."""
    return refused(Refusal("queue_full", message, 1.0, status=429))
