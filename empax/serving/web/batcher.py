"""The queue of requests to the systems; waiting requests are batched."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import math
import time
from collections.abc import AsyncGenerator, Callable, Hashable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from empax.core.config import ConfigError
from empax.serving.web.systems import Asked, Said, System

LEFT_SECONDS = 5
"""How long a server that shuts down waits for a batch without clients."""


class FullError(Exception):
    """The queue is full; retry after `seconds`."""

    def __init__(self, seconds: int):
        super().__init__(f"too many requests wait; come again in {seconds} s.")
        self.seconds = seconds


@dataclasses.dataclass(eq=False)
class _Row:
    """One requested reply.

    Attributes:
      number: its index in the request.
      group: rows of one group may be batched, at most `most` at a time.
      run: see `System.answer`.
      heard: a queue that receives the number with each piece, with the reply, or with an exception.
      done: whether the reply is complete or cancelled.
      begun: whether anything has been sent.
    """

    number: int
    group: Hashable
    run: Callable[..., Iterator[tuple[int, Any]]]
    most: int
    asked: Any
    heard: asyncio.Queue[tuple[int, Any]]
    done: bool = False
    begun: bool = False

    def tell(self, what: Any) -> None:
        if not self.done:
            self.done, self.begun = not isinstance(what, str), True
            self.heard.put_nowait((self.number, what))


class Batcher:
    """Runs systems in one thread, since they share the machine; first come, first served.

    Requests that arrive while the thread is busy are batched if possible; the thread never waits to fill a batch. A
    cancelled request is not answered, and its answer is abandoned if it is being generated.

    Args:
      places: maximum number of waiting replies; beyond it, raises `FullError`.
    """

    def __init__(self, places: int):
        self.places, self._waiting = places, collections.deque[_Row]()
        self._pool, self._loop, self._some = ThreadPoolExecutor(1, "empax"), None, asyncio.Event()
        self._seconds_per_row = 1.0
        self.on_batch: Callable[[int], object] = lambda rows: None

    def __len__(self) -> int:
        return len(self._waiting)

    async def replies(self, system: System, asked: Sequence[Asked]) -> AsyncGenerator[tuple[int, str | Said]]:
        """Yields, for each of `asked`, the pieces of its reply as they come, and then the whole reply.

        Raises:
          FullError: the queue has too few free places at the moment.
          ConfigError: the system cannot answer one of them, or they exceed all places.
        """
        if fixed := await asyncio.to_thread(system.at_once, asked[0]):  # they differ only in number
            for i in range(len(asked)):
                yield i, fixed
            return
        self._check(len(asked))  # before tokenizing them
        group = system.name, await asyncio.to_thread(system.group, asked[0])
        async with contextlib.aclosing(self._all(group, system.answer, system.batch_size, asked)) as heard:
            async for told in heard:
                yield told

    async def embed(self, system: System, texts: Sequence[str]) -> tuple[np.ndarray, int]:
        """Calls `System.embed`, queued with the replies."""
        run = lambda rows, _: iter([(0, system.embed(rows[0]))])  # noqa: E731
        [found] = [told async for _, told in self._all((system.name, "embed"), run, 1, [texts])]
        return found

    def _check(self, rows: int) -> None:
        if rows > self.places:
            raise ConfigError(f"n = {rows} is more than the {self.places} replies that may wait here.")
        if len(self._waiting) + rows > self.places:
            raise FullError(max(1, math.ceil(len(self._waiting) * self._seconds_per_row)))

    async def _all(
        self, group: Hashable, run: Callable[..., Any], most: int, asked: Sequence[Any]
    ) -> AsyncGenerator[Any]:
        """Yields what a request's rows hear, one row for each of `asked`; the other arguments are those of `_Row`."""
        self._check(len(asked))
        if self._loop is None:
            self._loop = asyncio.create_task(self._serve())
        heard = asyncio.Queue[tuple[int, Any]]()
        rows = [_Row(i, group, run, most, one, heard) for i, one in enumerate(asked)]
        self._waiting.extend(rows)
        self._some.set()
        try:
            while not all(row.done for row in rows) or not heard.empty():
                number, told = await heard.get()
                if isinstance(told, Exception):
                    raise told
                yield number, told
        finally:
            for row in rows:
                row.done = True
            self._leave_only(lambda row: not row.done)

    def _leave_only(self, waits: Callable[[_Row], bool]) -> None:
        self._waiting = collections.deque(row for row in self._waiting if waits(row))

    def _take(self) -> list[_Row]:
        """Takes the first waiting row and the rows that may be batched with it."""
        taken: list[_Row] = []
        for row in [row for row in self._waiting if not row.done]:
            if not taken or (row.group == taken[0].group and len(taken) < taken[0].most):
                taken.append(row)
        self._leave_only(lambda row: not row.done and row not in taken)
        return taken

    async def _serve(self) -> None:
        while True:
            await self._some.wait()
            if rows := self._take():
                await self._answer(rows)
            else:
                self._some.clear()

    async def _answer(self, rows: list[_Row]) -> None:
        begin, loop = time.monotonic(), asyncio.get_running_loop()

        def run() -> None:
            for number, told in rows[0].run([row.asked for row in rows], lambda i: not rows[i].done):
                loop.call_soon_threadsafe(rows[number].tell, told)

        try:
            await loop.run_in_executor(self._pool, run)
        except Exception as error:
            for row in rows:  # one failing row does not fail the others
                if len(rows) == 1 or row.begun:
                    row.tell(error)
                elif not row.done:
                    await self._answer([row])
            return
        self.on_batch(len(rows))
        self._seconds_per_row = 0.8 * self._seconds_per_row + 0.2 * (time.monotonic() - begin) / len(rows)

    async def close(self) -> None:
        """Ends the thread after its current batch; waits no longer than `LEFT_SECONDS`."""
        if self._loop is not None:
            self._loop.cancel()
        free = asyncio.wrap_future(self._pool.submit(lambda: None))  # runs after the current batch
        self._pool.shutdown(wait=False)
        await asyncio.wait({free}, timeout=LEFT_SECONDS)
