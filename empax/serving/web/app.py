"""The server: OpenAI's endpoints, a chat page, and endpoints for operators."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import re
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Sequence
from importlib import resources
from pathlib import Path
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException

from empax.core.config import ConfigError
from empax.core.text_files import DataError, message_of, visible
from empax.rating.study import ASPECTS
from empax.serving.web.batcher import Batcher, FullError
from empax.serving.web.gate import FAILED, LOG, Gate, Numbers, ServerSettings, place_of
from empax.serving.web.openai import (
    ApiError,
    ChatRequest,
    chat_request,
    completion,
    embedding_request,
    embeddings,
    events,
    known,
    text_of,
)
from empax.serving.web.systems import Said, System
from empax.serving.web.votes import Votes
from empax.serving.web.watch import Replies, check_run, watch_page

T = TypeVar("T")

_FILES = {"/": ("index.html", "text/html"), "/page.js": ("page.js", "text/javascript"),
          "/page.css": ("page.css", "text/css")}  # fmt: skip
_OPEN = (*_FILES, "/healthz")


class _Server:
    """State of the routes; two systems are compared side by side."""

    def __init__(self, systems: Sequence[System], settings: ServerSettings):
        if len(systems) == 2 and (silent := [system.name for system in systems if not system.options]):
            raise ConfigError(f"{silent[0]} is an encoder and writes no replies to compare; leave out --compare.")
        self.systems, self.settings = {system.name: system for system in systems}, settings
        self.votes = Votes(settings.votes, (systems[0].name, systems[1].name)) if len(systems) == 2 else None
        self.numbers, self.batcher = Numbers(), Batcher(settings.places)
        self.numbers.waiting.set_function(lambda: len(self.batcher))
        self.batcher.on_batch = self.numbers.rows.observe

    async def models(self) -> dict[str, Any]:
        data = [{"id": name, "object": "model", "created": 0, "owned_by": "empax"} for name in self.systems]
        return {"object": "list", "data": data}

    async def model(self, name: str) -> dict[str, Any]:
        return {"id": self._system(name)[0].name, "object": "model", "created": 0, "owned_by": "empax"}

    async def chat(self, request: Request) -> Response:
        asked = chat_request(await _body(request))
        system, blind = self._system(asked.model)
        replies = self._counted(asked, self.batcher.replies(system, asked.asked), pieces=not blind)
        if asked.stream:
            return await self._streamed(request, asked, replies, why=not blind)

        async def whole() -> list[Said]:
            async with contextlib.aclosing(replies):
                said = {i: one async for i, one in replies if isinstance(one, Said)}
            return [said[i] for i in sorted(said)]

        said = await self._answered(request, whole(), limit=asked.limit)
        return JSONResponse(completion(asked, said, why=not blind))

    async def _counted(
        self, asked: ChatRequest, replies: AsyncGenerator[Any], *, pieces: bool
    ) -> AsyncGenerator[tuple[int, Any]]:
        """Yields `replies` and counts metrics; without `pieces` drops pieces, which distinguish a model from a run."""
        said = list[Said]()
        async with contextlib.aclosing(replies):
            async for i, one in replies:
                if pieces or isinstance(one, Said):
                    yield i, one
                if isinstance(one, Said):
                    said.append(one)
                    self.numbers.tokens.labels("written").inc(one.completion_tokens)
        self.numbers.tokens.labels("read").inc(said[0].prompt_tokens)
        if self.settings.log_texts:
            LOG.info("%s", visible(json.dumps([*asked.asked[0].turns, *(s.text for s in said)], ensure_ascii=False)))

    async def _streamed(
        self, request: Request, asked: ChatRequest, replies: AsyncGenerator[tuple[int, Any]], *, why: bool
    ) -> Response:
        # An error before the first piece becomes an HTTP status.
        first = await self._answered(request, anext(replies), limit=asked.limit)

        async def rest() -> AsyncGenerator[tuple[int, Any]]:
            yield first
            try:
                async for one in replies:
                    yield one
            except Exception as error:
                LOG.error("%s in %s", type(error).__name__, place_of(error))
                raise ApiError(500, FAILED) from error

        async def sent() -> AsyncIterator[str]:
            try:
                async for event in events(asked, rest(), why=why):
                    yield event
            finally:  # also when the client disconnects
                await replies.aclose()

        return StreamingResponse(sent(), media_type="text/event-stream", headers={"X-Accel-Buffering": "no"})

    async def embeddings(self, request: Request) -> Response:
        name, texts, packed = embedding_request(await _body(request))
        system, blind = self._system(name)
        if blind:
            raise ApiError(400, "participants in a blinded conversation cannot embed texts.", param="model")
        vectors, tokens = await self._answered(request, self.batcher.embed(system, texts), param="input")
        self.numbers.tokens.labels("read").inc(tokens)
        return JSONResponse(embeddings(name, vectors, tokens, base64_wanted=packed))

    async def about(self) -> dict[str, Any]:
        """Returns the information for the page; for two systems, nothing that identifies them."""
        said = {"safety": self.settings.safety, "compares": self.votes is not None, "aspects": ASPECTS}
        if self.votes is None:
            (system,) = self.systems.values()
            said |= {"model": system.name, "options": sorted(system.options)}
        return said

    async def begin(self) -> dict[str, Any]:
        return {"conversation": self._votes().begin()}

    async def vote(self, request: Request) -> dict[str, Any]:
        body = await _body(request)
        known(body, ("conversation", "rater", "answers"))
        conversation, rater = (text_of(body.get(name), name) for name in ("conversation", "rater"))
        given = body.get("answers")
        given, votes = given if isinstance(given, dict) else {}, self._votes()
        try:
            # In a thread: the disk may be slow, and another server may be writing.
            who = await asyncio.to_thread(votes.vote, conversation, rater, given)
        except DataError as error:  # of our files, such as a full disk
            LOG.error("%s", message_of(error))
            raise ApiError(500, FAILED) from error
        except ValueError as error:
            raise ApiError(400, str(error), param=str(error).partition(":")[0]) from error
        if who is None:
            raise ApiError(404, "no such conversation is open: begin a new one.", param="conversation")
        return who

    def _votes(self) -> Votes:
        if self.votes is None:
            raise ApiError(404, "one system is served; --compare adds another.")
        return self.votes

    def _system(self, name: str) -> tuple[System, bool]:
        """Returns a system by its name or by its place in a blinded conversation, and whether it is blinded."""
        place = self.votes.system(name) if self.votes else None
        system = self.systems.get(place or name)
        if system is None:
            message = f"model {name!r:.60} does not exist; there are {', '.join(self.systems)}."
            raise ApiError(404, message, param="model", code="model_not_found")
        return system, place is not None

    async def _answered(
        self, request: Request, work: Awaitable[T], param: str = "messages", limit: str = "max_tokens"
    ) -> T:
        """Returns the result of `work`; cancels it when the client disconnects."""
        task = asyncio.ensure_future(work)
        gone = asyncio.ensure_future(_gone(request))
        try:
            await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise ApiError(499, "the client went away.")
            return task.result()
        except FullError as error:
            raise ApiError(503, str(error), code="overloaded", retry_after=error.seconds) from error
        except ConfigError as error:
            message = re.sub("^max_tokens", limit, str(error))
            named = [option for option in (limit, "temperature", "top_p", "n ") if message.startswith(option)]
            raise ApiError(400, message, param=(named or [param])[0].strip()) from error
        finally:
            task.cancel()
            gone.cancel()
            await asyncio.gather(task, gone, return_exceptions=True)


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _body(request: Request) -> Any:
    try:
        return json.loads(await request.body())
    except (ValueError, RecursionError) as error:
        raise ApiError(400, "the body is not JSON.") from error


def make_app(systems: Sequence[System], settings: ServerSettings) -> FastAPI:
    """Builds the ASGI application for one system, or for two that the page shows side by side.

    Raises:
      ConfigError: two systems have the same name, one of two is an encoder, or the folder has votes on other systems.
    """
    server = _Server(systems, settings)

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        await server.batcher.close()

    routes: list[tuple[str, str, Any]] = [
        *(("GET", path, functools.partial(_file, *file)) for path, file in _FILES.items()),
        ("POST", "/v1/chat/completions", server.chat), ("POST", "/v1/embeddings", server.embeddings),
        ("GET", "/v1/models", server.models), ("GET", "/v1/models/{name}", server.model),
        ("GET", "/about", server.about), ("POST", "/conversations", server.begin), ("POST", "/votes", server.vote),
        ("GET", "/healthz", _health), ("GET", "/metrics", functools.partial(_metrics, server.numbers)),
    ]  # fmt: skip
    app = _app(routes, settings, server.numbers, open_paths=_OPEN, lifespan=lifespan)
    app.state.server = server
    return app


def _app(
    routes: Sequence[tuple[str, str, Any]],
    settings: ServerSettings,
    numbers: Numbers,
    *,
    open_paths: Sequence[str] = (),
    lifespan: Any = None,
) -> FastAPI:
    app = FastAPI(title="empax", docs_url=None, redoc_url=None, openapi_url=None, lifespan=lifespan)
    for method, path, route in routes:
        app.add_api_route(path, route, methods=[method], response_model=None)
    app.add_exception_handler(ApiError, _error)
    app.add_exception_handler(HTTPException, _no_route)
    paths = [path for _, path, _ in routes]
    app.add_middleware(Gate, settings=settings, numbers=numbers, paths=paths, open_paths=open_paths)
    return app


def make_watch_app(workdir: Path, settings: ServerSettings) -> FastAPI:
    """Builds the ASGI application that shows the page of a run in training, and nothing else.

    Raises:
      ConfigError: the run does not exist.
    """
    check_run(workdir)
    replies = Replies(workdir, settings.watched_replies)

    def page() -> Response:  # in a thread, since it reads files
        return Response(watch_page(workdir, replies), media_type="text/html")

    sheet = functools.partial(_file, *_FILES["/page.css"])
    return _app([("GET", "/", page), ("GET", "/page.css", sheet)], settings, Numbers())


async def _file(name: str, kind: str) -> Response:
    return Response(resources.files("empax.serving.web").joinpath(name).read_text("utf-8"), media_type=kind)


async def _health() -> dict[str, str]:
    return {"status": "ok"}


async def _metrics(numbers: Numbers) -> Response:
    return Response(numbers.text(), media_type="text/plain; version=0.0.4")


async def _error(_: Request, error: Any) -> Response:
    return JSONResponse(error.body, error.status, error.headers)


async def _no_route(request: Request, error: Any) -> Response:
    body = ApiError(error.status_code, f"{request.method} {request.url.path[:100]}: {error.detail}.").body
    return JSONResponse(body, error.status_code, error.headers)
