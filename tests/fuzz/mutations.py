"""What the fuzz tests share: damaged copies of files, a process that may die of one, and the counts.

`python -m pytest -q -s -m slow tests/fuzz` prints one JSON line for each reader.
"""

import collections
import copy
import json
import multiprocessing
import resource
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

EXAMPLES = 400
"""Inputs for each reader."""

FUZZ = settings(
    max_examples=EXAMPLES, deadline=None, database=None, derandomize=True, suppress_health_check=list(HealthCheck)
)
"""Settings of a fuzz test: the same inputs each time."""

REFUSED = ("ConfigError", "DataError", "CheckpointError")
"""How a reader may refuse a file; any other exception is a fault."""

_INTEGERS = (0, 1, -1, 127, 128, 255, 2**15, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**62, 2**63 - 1, -(2**31), -(2**63))
_ODD_VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2, 7, 10**6, 2**31, 2**63, 10**30, 0.5, -0.5, 1e-300, 1e300),
    *(float("nan"), float("inf"), "", "0", "16", "x" * 5000, "\udc00", "\x00", [], [1], [None], {}, {"a": {}}, [[[]]]),
)


def mutations(data: bytes, donors: Sequence[bytes] = ()) -> st.SearchStrategy[bytes]:
    """Copies of `data` with one to three edits: flipped bits, cuts, splices of it and of `donors`, odd integers."""
    edit = st.tuples(
        st.sampled_from(("flip", "flip", "cut", "drop", "insert", "overwrite", "integer", "integer")),
        st.integers(0, max(len(data) - 1, 0)),
        st.integers(0, max(len(data) - 1, 0)),
        st.integers(0, 2**16 - 1),
    )
    return st.lists(edit, min_size=1, max_size=3).map(lambda edits: _edited(data, donors or (data,), edits))


def _edited(data: bytes, donors: Sequence[bytes], edits: Iterable[tuple[str, int, int, int]]) -> bytes:
    new = bytearray(data)
    for kind, place, other, choice in edits:
        place = min(place, len(new))
        donor = donors[choice % len(donors)]
        piece = donor[other % max(len(donor), 1) :][: 1 + choice % 64]
        if kind == "flip" and place < len(new):
            new[place] ^= 1 << choice % 8
        elif kind == "cut":
            del new[place:]
        elif kind == "drop":
            del new[place : place + 1 + choice % 64]
        elif kind == "insert":
            new[place:place] = piece
        elif kind == "overwrite":
            new[place : place + len(piece)] = piece
        elif kind == "integer":
            size = (1, 2, 4, 8)[choice % 4]
            value = _INTEGERS[choice // 4 % len(_INTEGERS)]
            # Aligned to what a header most likely has there.
            place -= place % size if choice & 64 else 0
            new[place : place + size] = (value % 2 ** (8 * size)).to_bytes(size, "big" if choice & 128 else "little")
    return bytes(new)


def json_mutations(value: Any) -> st.SearchStrategy[Any]:
    """Copies of a JSON value with one or two of its fields replaced by odd values, taken away or exchanged."""
    places = list(_places(value))
    edit = st.tuples(
        st.sampled_from(("replace", "replace", "remove", "exchange", "negate")),
        st.sampled_from(places),
        st.sampled_from(places),
        st.sampled_from(_ODD_VALUES),
    )
    return st.lists(edit, min_size=1, max_size=2).map(lambda edits: _changed(value, edits))


def _places(value: Any, path: tuple[Any, ...] = (), most: int = 40) -> Iterable[tuple[Any, ...]]:
    """Paths to the parts of a JSON value; of a long list or table, some."""
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in list(items)[:most]:
        yield from _places(inner, (*path, key), most)


def _changed(value: Any, edits: Iterable[tuple[str, tuple[Any, ...], tuple[Any, ...], Any]]) -> Any:
    root = {"root": copy.deepcopy(value)}
    for kind, path, other, odd in edits:
        *before, last = ("root", *path)
        try:
            parent: Any = root
            for key in before:
                parent = parent[key]
            found = parent[last]
            if kind == "remove" and before:
                del parent[last]
                continue
            if kind == "exchange":
                odd = root["root"]
                for key in other:
                    odd = odd[key]
                odd = copy.deepcopy(odd)
            elif kind == "negate" and isinstance(found, int | float):
                odd = -found
            parent[last] = odd
        except (LookupError, TypeError):  # the edit before took the place away
            continue
    return root["root"]


class Worker:
    """A process that calls `read` on what it is sent, so that a crash or a hang ends it and not the tests.

    Args:
      read: an importable function of an input (bytes, text or any value that can be sent). It returns "read" or
        "damaged" (read wrong where the file has a checksum); what it raises becomes the outcome.
      seconds: after which an input counts as a hang.
      memory: bytes that the process may take beyond what it has at the start.
    """

    def __init__(self, read: Callable[..., str], *, seconds: float = 60.0, memory: int = 4 << 30):
        self._read, self._seconds, self._memory = read, seconds, memory
        self._pool: Any = None

    def __call__(self, *inputs: Any) -> str:
        """The outcome of one input: "read", "refused", "damaged", "crash", "hang" or "TypeError: ..."."""
        if self._pool is None:
            context, begin = multiprocessing.get_context("spawn"), (self._read, self._memory)
            self._pool = ProcessPoolExecutor(1, context, _limit, begin)
            self._pool.submit(str).result()  # it has imported what it needs
        try:
            return self._pool.submit(_outcome, self._read, inputs).result(self._seconds)
        except (TimeoutError, BrokenProcessPool) as error:
            self.close()
            return "hang" if isinstance(error, TimeoutError) else "crash"

    def close(self) -> None:
        """Ends the process."""
        if self._pool is not None:
            for process in [*(self._pool._processes or {}).values()]:
                process.kill()
            self._pool.shutdown()
            self._pool = None


def _limit(read: Callable[..., str], memory: int) -> None:
    with open("/proc/self/statm") as file:
        pages = int(file.read().split()[0])
    limit = pages * resource.getpagesize() + memory
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _outcome(read: Callable[..., str], inputs: Sequence[Any]) -> str:
    try:
        return read(*inputs)
    except BaseException as error:  # whatever it is, it is counted
        name = type(error).__name__
        return "refused" if name in REFUSED else f"{name}: {str(error)[:200]}"


def check(reader: str, read: Callable[..., str], inputs: st.SearchStrategy[tuple[Any, ...]], **options: Any) -> None:
    """Reads EXAMPLES damaged inputs, and prints how often each outcome came, as one JSON line; none may be a fault.

    Args:
      reader: what the line calls it.
      read: see `Worker`, which takes the `options` too.
      inputs: arguments of `read`.
    """
    worker, outcomes = Worker(read, **options), collections.Counter[str]()

    @FUZZ
    @given(inputs)
    def run(damaged: tuple[Any, ...]) -> None:
        outcome = worker(*damaged)
        outcomes[outcome.split(":")[0].split(" (")[0]] += 1
        if outcome not in ("read", "refused"):
            print(outcome, repr(damaged)[:300])

    try:
        run()
    finally:
        worker.close()
    total, known = outcomes.total(), ("read", "refused", "damaged", "crash", "hang")
    row = {"reader": reader, "inputs": total, **{name: outcomes[name] for name in known}}
    print(json.dumps({**row, "other_exceptions": total - sum(outcomes[name] for name in known)}), flush=True)
    assert total >= 300
    assert outcomes["refused"] > 0
    assert outcomes["read"] + outcomes["refused"] == total
