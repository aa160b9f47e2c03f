"""The HTTP edge: OpenAI's endpoints over the dispatcher. HTTP stops here: in goes an Ask, back comes a Reply.

    body -> (off the loop: check, render, tokenise) -> one Ask a prompt -> serve -> one JSON answer, or events

A request ends in exactly one way: a whole answer, a stream that ends with `[DONE]`, an error status, or, once
a stream has begun, an error event after which the stream ends without `[DONE]`.
"""

import asyncio
import logging
import random
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, replace
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from aiohttp import hdrs, web

from conductor.answer import Answer, Choice, Chunks, Listener, Part, Silence, Watch
from conductor.ask import Ask, Failed, Refusal, Refused, Serve
from conductor.config import ConductorConfig
from conductor.intake import Intake, ServerLog, error_response, expect, json_response, send_whole
from conductor.metrics import CONTENT_TYPE, Metrics
from conductor.openai import SEED_BITS
from conductor.order import Order, Orders, Prompts
from conductor.problem import Outcome, Problem, failed, fault, overloaded, refused
from conductor.shapes import Head, chunk, event, model, models, whole
from conductor.sse import ClientGone, EventStream
from protocol.cluster import Manifest
from protocol.ids import RequestId
from protocol.tasks import together

REQUESTS_MAX = 1024
"""Requests at once whose bodies and answers this process holds; the dispatcher's own limit lies far below."""

TOKENISERS = 2
"""Threads for checking and tokenising small bodies: some milliseconds each. Large ones, which take seconds, have a
thread of their own, so that the small never wait for them, and memory is needed for one at a time."""

GRACE_S = 1.0
"""Past a request's deadline the dispatcher has so long to say that it failed, before the gateway does."""

LAST_WORD_S = 1.0
"""All requests have ended when the application does: this is for answers that are still being sent."""

REQUEST_ID = "X-Request-Id"
REQUEST_ID_CHARS_MAX = 128
OWN_ID = web.RequestKey("own_id", str)
"""Unique and ours: it names the request in every process."""

ECHO_ID = web.RequestKey("echo_id", str)
"""What the client calls the request; ours if it has no name for it."""

NOT_IN_A_REQUEST_ID = re.compile(r"[^A-Za-z0-9._:\-]")

DONE = b"data: [DONE]\n\n"

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Take = Callable[[bytes, int], Order]

logger = logging.getLogger(__name__)


class Ending:
    """How one request ends, for the metrics: failed, unless someone knows better."""

    outcome = Outcome.FAILED


class Gateway:
    """Owns the HTTP application and the threads that tokenise."""

    def __init__(
        self,
        serve: Serve,
        tokenizer: Prompts,
        manifest: Manifest,
        metrics: Metrics,
        config: ConductorConfig,
        dice: random.Random,
    ) -> None:
        """`dice` draws request ids, and the seeds of requests that bring none: `random.SystemRandom()`."""
        self._serve = serve
        self._tokenizer = tokenizer
        self._manifest = manifest
        self._metrics = metrics
        self._config = config
        self._dice = dice
        self._orders = Orders(tokenizer, manifest)
        self._threads = ThreadPoolExecutor(TOKENISERS, thread_name_prefix="tokenise")
        self._thread_of_large = ThreadPoolExecutor(1, thread_name_prefix="tokenise-large")
        self._intake = Intake()
        self._open = 0
        self._created = _unix_s()

    def app(self) -> web.Application:
        """The application. Serve it with `runner`, or the handlers of clients that left would go on."""
        app = web.Application(middlewares=[self._guard])
        app.router.add_post("/v1/chat/completions", self._chat, expect_handler=expect)
        app.router.add_post("/v1/completions", self._completion, expect_handler=expect)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/v1/models/{name:.+}", self._model)
        app.router.add_get("/health", self._health)
        app.router.add_get("/ready", self._ready)
        app.router.add_get("/metrics", self._scrape)
        app.router.add_get("/version", self._version)
        app.on_response_prepare.append(_stamp)
        app.cleanup_ctx.append(self._lifetime)
        return app

    def runner(self) -> web.AppRunner:
        """A runner for `app` that cancels a handler when its client closes the connection, half or whole."""
        return web.AppRunner(
            self.app(),
            handler_cancellation=True,
            access_log=None,
            logger=ServerLog(logger, {}),
            shutdown_timeout=LAST_WORD_S,
        )

    async def _lifetime(self, _app: web.Application) -> AsyncIterator[None]:
        yield
        for threads in (self._threads, self._thread_of_large):
            threads.shutdown(wait=False, cancel_futures=True)

    # --- endpoints

    async def _chat(self, http: web.Request) -> web.StreamResponse:
        return await self._answer(http, self._orders.chat)

    async def _completion(self, http: web.Request) -> web.StreamResponse:
        return await self._answer(http, self._orders.completion)

    async def _models(self, _http: web.Request) -> web.Response:
        return json_response(models([self._card()]))

    async def _model(self, http: web.Request) -> web.Response:
        self._orders.require_model(http.match_info["name"])
        return json_response(self._card())

    async def _health(self, _http: web.Request) -> web.Response:
        return web.Response()

    async def _ready(self, _http: web.Request) -> web.Response:
        readiness = self._serve.readiness()
        return json_response(asdict(readiness), 200 if readiness.ready else 503)

    async def _scrape(self, _http: web.Request) -> web.Response:
        return web.Response(body=self._metrics.render(), headers={hdrs.CONTENT_TYPE: CONTENT_TYPE})

    async def _version(self, _http: web.Request) -> web.Response:
        return json_response({"version": _own_version()})

    def _card(self) -> dict[str, Any]:
        return model(self._manifest.model, self._created, self._manifest.context_tokens)

    # --- one request

    async def _answer(self, http: web.Request, take: Take) -> web.StreamResponse:
        """From body to answer. Raises Problem as long as the client can be sent a status."""
        arrived = _now()
        with self._counted(arrived) as ending:
            order = await self._order(http, take)
            name = f"{order.shape.id_prefix}{http[OWN_ID]}"
            head = Head(name, _unix_s(), self._manifest.model, order.urgency.served_tier)
            work = self._streamed if order.stream else self._whole
            return await work(http, order, head, arrived, ending)

    @contextmanager
    def _counted(self, arrived: float) -> Iterator[Ending]:
        """Counts a request in and out, whatever becomes of it."""
        ending = Ending()
        self._open += 1
        self._metrics.arrived()
        try:
            if self._open > REQUESTS_MAX:
                raise self._refused(overloaded(f"{REQUESTS_MAX} requests are open already."))
            yield ending
        except Problem as problem:
            ending.outcome = problem.outcome
            raise
        except asyncio.CancelledError:
            ending.outcome = Outcome.CANCELLED
            raise
        finally:
            self._open -= 1
            self._metrics.left(ending.outcome, _now() - arrived)

    async def _order(self, http: web.Request, take: Take) -> Order:
        """The body, checked and tokenised off the loop; its headers too. Raises Problem."""
        seed = self._dice.getrandbits(SEED_BITS)
        try:
            async with asyncio.timeout(self._config.request_s), self._intake.body(http) as body:
                threads = self._thread_of_large if body.large else self._threads
                order = await asyncio.get_running_loop().run_in_executor(threads, take, body.data, seed)
        except TimeoutError:
            raise failed(self._too_late()) from None
        return replace(order, urgency=order.urgency.with_headers(http.headers))

    async def _whole(
        self, http: web.Request, order: Order, head: Head, arrived: float, ending: Ending
    ) -> web.StreamResponse:
        answer = self._new_answer(order, Silence(), arrived)
        try:
            await self._serve_all(http, order, answer, arrived)
        except Refused as error:
            raise self._refused(error.refusal) from None
        except Failed as error:
            raise failed(error) from None
        choices = [
            order.shape.choice(choice.index, choice.text, choice.told, choice.reason.value)
            for choice in answer.choices
            if choice.reason is not None
        ]
        response = json_response(whole(order.shape, head, choices, answer.usage()))
        try:
            await send_whole(http, response)
            ending.outcome = Outcome.FINISHED
        except ClientGone:
            ending.outcome = Outcome.CANCELLED
        return response

    async def _streamed(
        self, http: web.Request, order: Order, head: Head, arrived: float, ending: Ending
    ) -> web.StreamResponse:
        stream = EventStream(http, _now)
        chunks = Chunks(stream, order.shape, head, with_usage=order.continuous_usage)
        answer = self._new_answer(order, chunks, arrived)
        try:
            await together([self._until_served(http, order, answer, arrived, stream), self._beat(stream)])
            last = [event(chunk(order.shape, head, [], answer.usage()))] if order.include_usage else []
            await stream.send(b"".join([*last, DONE]))
            ending.outcome = Outcome.FINISHED
        except ClientGone:
            ending.outcome = Outcome.CANCELLED
        except Exception as error:
            ending.outcome = await _break_off(stream, self._problem(error))
        return stream.response

    async def _until_served(
        self, http: web.Request, order: Order, answer: Answer, arrived: float, stream: EventStream
    ) -> None:
        try:
            await self._serve_all(http, order, answer, arrived)
        finally:
            stream.end()

    async def _beat(self, stream: EventStream) -> None:
        await stream.keep_alive(self._config.keep_alive_s)

    async def _serve_all(self, http: web.Request, order: Order, answer: Answer, arrived: float) -> None:
        """Every prompt to its end, side by side. Raises Refused or Failed of the first that was not served."""
        waited_s = _now() - arrived
        within_s = max(0.0, self._config.request_s - waited_s)
        priority, limits = order.urgency.priority, order.urgency.limits(self._config)
        asks = [
            Ask(
                request,
                prompt,
                samplings,
                salt=order.salt,
                within_s=within_s,
                waited_s=waited_s,
                priority=priority,
                limits=limits,
            )
            for request, prompt, samplings in zip(_names(http, order), order.prompts, order.samplings, strict=True)
        ]
        firsts = [number * len(ask.samplings) for number, ask in enumerate(asks)]
        try:
            async with asyncio.timeout(within_s + GRACE_S):
                await together(
                    [
                        self._serve.serve(ask, Part(answer, first, len(ask.prompt)))
                        for ask, first in zip(asks, firsts, strict=True)
                    ]
                )
        except TimeoutError:
            raise self._too_late() from None
        answer.require_complete()

    def _problem(self, error: Exception) -> Problem:
        match error:
            case Refused():
                return self._refused(error.refusal)
            case Failed():
                return failed(error)
            case _:
                logger.error("a mistake in a stream", exc_info=error)
                return fault()

    def _refused(self, refusal: Refusal) -> Problem:
        self._metrics.refused(refusal.reason)
        return refused(refusal, self._config.refusal_status)

    def _too_late(self) -> Failed:
        return Failed(f"The request did not end within {self._config.request_s:g} s.")

    def _new_answer(self, order: Order, listener: Listener, arrived: float) -> Answer:
        samplings = [sampling for of_prompt in order.samplings for sampling in of_prompt]
        choices = [
            Choice(index, self._tokenizer, order.stops, sampling) for index, sampling in enumerate(samplings)
        ]
        tokens = sum(map(len, order.prompts))
        return Answer(choices, tokens, listener, Watch(self._metrics, _now, arrived))

    # --- around every request

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Names the request, and turns whatever goes wrong into OpenAI's error object."""
        self._name(request)
        try:
            return await handler(request)
        except Problem as problem:
            return error_response(problem)
        except web.HTTPException as error:
            return error_response(_of_http(error))
        except Exception:
            logger.exception("a mistake in request %s", request[OWN_ID])
            return error_response(fault())

    def _name(self, http: web.Request) -> None:
        own = f"{self._dice.getrandbits(64):016x}"
        given = NOT_IN_A_REQUEST_ID.sub("", http.headers.get(REQUEST_ID, ""))[:REQUEST_ID_CHARS_MAX]
        http[OWN_ID] = f"{given}-{own}" if given else own
        http[ECHO_ID] = given or own


async def _break_off(stream: EventStream, problem: Problem) -> Outcome:
    """Tells a streaming client that there will be no more: by status if that is still free, else by an event."""
    if not stream.started:
        raise problem
    try:
        await stream.send(event(problem.body()))
    except ClientGone:
        logger.debug("the client left before it could be told: %s", problem)
    return problem.outcome


def _of_http(error: web.HTTPException) -> Problem:
    """An unknown path, or a method that a path does not have."""
    problem = Problem(error.status, error.reason, code=error.reason.lower().replace(" ", "_"))
    if hdrs.ALLOW in error.headers:
        problem.headers[hdrs.ALLOW] = error.headers[hdrs.ALLOW]
    return problem


def _names(http: web.Request, order: Order) -> list[RequestId]:
    if len(order.prompts) == 1:
        return [RequestId(http[OWN_ID])]
    return [RequestId(f"{http[OWN_ID]}-{number}") for number in range(len(order.prompts))]


async def _stamp(http: web.Request, response: web.StreamResponse) -> None:
    if ECHO_ID in http:
        response.headers[REQUEST_ID] = http[ECHO_ID]


def _own_version() -> str:
    try:
        return version("dango-serve")
    except PackageNotFoundError:  # run from a checkout that was never installed
        return "unknown"


def _now() -> float:
    return asyncio.get_running_loop().time()


def _unix_s() -> int:
    return int(datetime.now(UTC).timestamp())
