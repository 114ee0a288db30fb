"""The queue in front of the systems: those that wait together are answered together."""

from __future__ import annotations

import asyncio
import collections
import math
import time
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np

from empax.serving.web.systems import Asked, Said, System


class FullError(Exception):
    """No place in the queue is free; `seconds` says when to come again."""

    def __init__(self, seconds: int):
        super().__init__(f"too many requests wait; come again in {seconds} s.")
        self.seconds = seconds


class _Row(NamedTuple):
    group: Hashable
    run: Callable[[list[Any]], list[Any]]
    most: int
    asked: Any
    done: asyncio.Future[Any]


class Batcher:
    """Asks systems in one thread, since they share the machine. Whoever comes first is served first.

    What came while the thread was busy goes together where it may: there is no wait for company. A request that nobody
    waits for any more (its task was cancelled) is not answered.

    Args:
      places: how many replies may wait; beyond that, `FullError`.
    """

    def __init__(self, places: int):
        self.places, self._waiting = places, collections.deque[_Row]()
        self._pool, self._loop, self._some = ThreadPoolExecutor(1, "empax"), None, asyncio.Event()
        self._seconds_per_row = 1.0
        self.on_batch: Callable[[int], object] = lambda rows: None

    def __len__(self) -> int:
        return len(self._waiting)

    async def ask(self, system: System, asked: Sequence[Asked]) -> list[Said]:
        """A reply to each, in order.

        Raises:
          FullError: there are not as many places.
          ConfigError: the system cannot answer one of them.
        """
        self._check(len(asked))  # before the work of reading them
        groups = [await asyncio.to_thread(system.group, one) for one in asked[:1]] * len(asked)  # they differ in number
        return await self._all([((system.name, g), system.answer, system.batch_size, one)
                                for g, one in zip(groups, asked, strict=True)])  # fmt: skip

    async def embed(self, system: System, texts: Sequence[str]) -> tuple[np.ndarray, int]:
        """As `System.embed`, in turn with the replies."""
        [found] = await self._all([((system.name, "embed"), lambda rows: [system.embed(rows[0])], 1, texts)])
        return found

    def _check(self, rows: int) -> None:
        if len(self._waiting) + rows > self.places:
            raise FullError(max(1, math.ceil(len(self._waiting) * self._seconds_per_row)))

    async def _all(self, wanted: Sequence[tuple[Hashable, Callable[..., Any], int, Any]]) -> list[Any]:
        self._check(len(wanted))
        if self._loop is None:
            self._loop = asyncio.create_task(self._serve())
        rows = [_Row(*one, asyncio.get_running_loop().create_future()) for one in wanted]
        self._waiting.extend(rows)
        self._some.set()
        try:
            return await asyncio.gather(*(row.done for row in rows))
        finally:
            for row in rows:
                row.done.cancel()  # nothing where it is done

    def _take(self) -> list[_Row]:
        """The first that waits, and those that may go with it."""
        taken: list[_Row] = []
        for row in [row for row in self._waiting if not row.done.done()]:
            if not taken or (row.group == taken[0].group and len(taken) < taken[0].most):
                taken.append(row)
        self._waiting = collections.deque(r for r in self._waiting if not r.done.done() and r not in taken)
        return taken

    async def _serve(self) -> None:
        while True:
            await self._some.wait()
            if rows := self._take():
                await self._answer(rows)
            else:
                self._some.clear()

    async def _answer(self, rows: list[_Row]) -> None:
        begin = time.monotonic()
        try:
            work = asyncio.get_running_loop().run_in_executor(self._pool, rows[0].run, [row.asked for row in rows])
            found = await work
        except Exception as error:
            if len(rows) == 1:
                if not rows[0].done.done():
                    rows[0].done.set_exception(error)
                return
            for row in rows:  # one that fails does not take the others along
                await self._answer([row])
            return
        self.on_batch(len(rows))
        self._seconds_per_row = 0.8 * self._seconds_per_row + 0.2 * (time.monotonic() - begin) / len(rows)
        for row, said in zip(rows, found, strict=True):
            if not row.done.done():
                row.done.set_result(said)

    async def close(self) -> None:
        """Ends the thread, after what it does at the moment."""
        if self._loop is not None:
            self._loop.cancel()
        await asyncio.to_thread(self._pool.shutdown)
