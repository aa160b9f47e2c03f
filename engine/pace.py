"""How fast an instance's engine has been of late."""

DECAY = 0.8
"""Weight of the past in the moving means: about five steps of memory."""

SECONDS_MIN = 1e-9
"""A clock may not have moved during a very short step."""


class Pace:
    """Moving means over the steps of one engine; 0 before the first. Mutates: count."""

    def __init__(self) -> None:
        self.steps = 0
        """Steps so far."""
        self.step_s = 0.0
        """Mean time of a step, in seconds."""
        self.tokens_s = 0.0
        """Mean rate, in tokens a second."""

    def count(self, tokens: int, seconds: float) -> None:
        """Take in one more step."""
        past = DECAY if self.steps else 0.0
        self.steps += 1
        self.step_s = past * self.step_s + (1 - past) * seconds
        self.tokens_s = past * self.tokens_s + (1 - past) * tokens / max(seconds, SECONDS_MIN)
