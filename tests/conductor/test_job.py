"""A client hears once that its request was let in and computed, however many attempts and choices it became."""

import asyncio
from dataclasses import replace

from conductor.job import Job
from tests.cluster import Listener, an_ask


class Counting(Listener):
    def __init__(self) -> None:
        super().__init__()
        self.let_in = 0

    def admitted(self) -> None:
        self.let_in += 1


async def a_job(reply: Listener) -> Job:
    ask = an_ask([1, 2, 3])
    return Job(ask, reply, asyncio.get_running_loop().time() + ask.within_s, ask.request)


async def test_of_many_attempts_the_first_is_told():
    reply = Counting()
    job = await a_job(reply)
    for attempt in (job, replace(job), replace(job)):
        attempt.admitted()
        attempt.prefilled(16)
    assert (reply.let_in, reply.reused) == (1, [16])


async def test_a_prompt_that_is_computed_again_behind_an_answer_is_not_told():
    reply = Counting()
    job = await a_job(reply)
    job.told.tokens = True
    replace(job).prefilled(16)
    assert reply.reused == []
