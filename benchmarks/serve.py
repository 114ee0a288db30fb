"""`empax serve` under load: batched replies against one at a time, otherwise the same.

The users of our client talk to a server on this machine; each waits for a reply before it sends the next message. A
third server shows the memory use after many short requests.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import http.client
import itertools
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks import texts
from benchmarks.paired import DisagreementError, Row, arguments, in_turns, report
from benchmarks.shapes import fields_of

HELD_EQUAL = (
    "`python -m empax.serve` in a process of its own for every measurement, in turns; the client is another process on "
    "the same cores, over loopback, and asks for streams",
    "both sides: the same model, decoded as it is published, and greedily; conversations of the test split in their "
    "order; as many users, none of whom pauses; every program is compiled before",
    "ours: --batch replies at once; theirs: the same server with --batch=1",
    "every request is answered, or refused with 503 and asked again after a second; anything else is an error",
    "at least 99% of the replies that both sides gave to one conversation must be the same texts",
    "memory: resident set of the server after each tenth of --requests replies of two tokens",
)
_ROOT = Path(__file__).resolve().parent.parent
_PATIENCE = 300
"""Timeout of a client in seconds for one reply, or for the start of the server."""


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    parser = arguments(__doc__ or "", HELD_EQUAL, rounds=1)
    texts.add_flag(parser)
    parser.add_argument("--model", default="empathetic-t5-small", help="model to serve (empathetic-t5-small)")
    parser.add_argument("--users", type=int, default=64, help="users at once (64)")
    parser.add_argument("--seconds", type=float, default=60.0, help="length of each measurement (60)")
    parser.add_argument("--batch", type=int, default=16, help="replies that our side generates at once (16)")
    parser.add_argument(
        "--requests", type=int, default=10_000, help="requests to measure memory with; 0 = none (10,000)"
    )
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as scratch:
        if options.smoke:
            options.model, options.users, options.seconds, options.batch = str(tiny_model(Path(scratch))), 4, 1.0, 4
            options.requests = 40
        talks = [list(one.context) for one in texts.instances(options.data, "test")]
        rows = {}
        for name, asked in (("as published", {}), ("greedy", {"temperature": 0})):
            rows[name] = measure(options, talks, asked)
            print(f"{name}: {rows[name]}", file=sys.stderr, flush=True)  # printed now, since the rest takes long
        memory = {"memory_mb": resident(options, talks)} if options.requests else {}
    sizes = f"{Path(options.model).name}, {options.users} users, {options.seconds:g} s, batches of {options.batch}"
    return report("serve", rows, (*HELD_EQUAL, sizes), smoke=options.smoke, **memory)


@dataclasses.dataclass
class Load:
    """Measurements of the users.

    Attributes:
      seconds: seconds of each reply.
      first: seconds until its first piece.
      refused: number of responses with status 503.
      said: replies by number of the conversation.
      took: seconds from the first request to the last reply.
    """

    seconds: list[float] = dataclasses.field(default_factory=list)
    first: list[float] = dataclasses.field(default_factory=list)
    refused: int = 0
    said: dict[int, str] = dataclasses.field(default_factory=dict)
    took: float = 0.0

    def facts(self) -> dict[str, Any]:
        """Returns the number of requests, and quantiles in seconds."""
        found: dict[str, Any] = {"replies": len(self.seconds), "refused_503": self.refused}
        for name, values in (("", self.seconds), ("first_piece_", self.first)):
            cuts = statistics.quantiles(values, n=100) if len(values) > 1 else values * 99
            found |= {f"{name}p{cut}_seconds": round(cuts[cut - 1], 3) for cut in (50, 95, 99)}
        return found


def measure(options: argparse.Namespace, talks: Sequence[list[str]], asked: dict[str, Any]) -> Row:
    """Measures requests per second of both sides."""

    def side(batch: int) -> Load:
        with server(options, batch) as port:
            for talk in sorted(talks, key=lambda talk: sum(map(len, talk)))[:: -max(len(talks) // 3, 1)]:  # compiles
                for rows in (1, batch + 1):
                    asyncio.run(users(port, options.model, [talk], asked, rows, count=rows))
            asyncio.run(users(port, options.model, talks, asked, options.users, count=options.users + 4 * batch))
            return asyncio.run(users(port, options.model, talks, asked, options.users, seconds=options.seconds))

    pairs = in_turns(lambda _: side(options.batch), lambda _: side(1), options.rounds)
    both = [(one.said[i], other.said[i]) for one, other in pairs for i in one.said.keys() & other.said.keys()]
    same = sum(one == other for one, other in both) / max(len(both), 1)
    if same < 0.99:
        raise DisagreementError(f"only {same:.1%} of the replies are the same.")
    rates = [[len(load.seconds) / load.took for load in pair] for pair in pairs]
    facts = {"ours": pairs[-1][0].facts(), "theirs": pairs[-1][1].facts()}
    facts = {f"{name}_{fact}": value for name, some in facts.items() for fact, value in some.items()}
    ours, theirs = zip(*rates, strict=True)
    return Row(ours, theirs, "replies/s", more_is_better=True, facts={**facts, "same_replies": round(same, 4)})


def resident(options: argparse.Namespace, talks: Sequence[list[str]]) -> list[float]:
    """Returns the megabytes of the server, at first and after each tenth of the requests."""
    asked = {"temperature": 0, "max_tokens": 2}
    with server(options, options.batch) as port:
        found = []
        asyncio.run(users(port, options.model, talks, asked, options.users, count=2 * options.users))
        for _ in range(10):
            found.append(_resident_megabytes(port))
            asyncio.run(users(port, options.model, talks, asked, options.users, count=options.requests // 10))
        return [*found, _resident_megabytes(port)]


async def users(
    port: int, model: str, talks: Sequence[list[str]], asked: dict[str, Any], number: int, *, seconds: float = 0.0,
    count: int = 0,
) -> Load:  # fmt: skip
    """Runs `number` users for `seconds`, or until they have received `count` replies."""
    load, begin, turn = Load(), time.perf_counter(), itertools.count()

    async def user() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for i in turn:
            if i >= count if count else time.perf_counter() - begin > seconds:
                break
            talk = talks[i % len(talks)]
            messages = [{"role": _ROLES[(len(talk) - j) % 2], "content": said} for j, said in enumerate(talk)]
            body = {"model": Path(model).name, "messages": messages, "stream": True, **asked}
            while not await _reply(reader, writer, body, load, i % len(talks)):
                await asyncio.sleep(1.0)
        writer.close()

    await asyncio.gather(*(user() for _ in range(number)))
    load.took = time.perf_counter() - begin
    return load


_ROLES = ("assistant", "user")


async def _reply(reader: Any, writer: Any, body: dict[str, Any], load: Load, talk: int) -> bool:
    """Sends a request and waits for the end of the reply; returns False if the server is full."""
    sent, begin = json.dumps(body).encode(), time.perf_counter()
    head = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    writer.write(f"{head}Content-Length: {len(sent)}\r\n\r\n".encode() + sent)
    async with asyncio.timeout(_PATIENCE):
        told = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        status = int(told.split(" ", 2)[1])
        if status != 200:
            answer = await reader.readexactly(int(told.split("content-length:")[1].split("\r\n")[0]))
            if status != 503:
                raise RuntimeError(f"the server says {status}: {answer[:300].decode()}")
            load.refused += 1
            return False
        text, first = "", 0.0
        while size := int(await reader.readuntil(b"\r\n"), 16):
            for event in (await reader.readexactly(size + 2)).decode().split("\n\n"):
                if not event.startswith("data: {"):
                    continue
                said = json.loads(event.removeprefix("data: "))
                if "error" in said:
                    raise RuntimeError(f"the server says: {said['error']['message']}")
                text += said["choices"][0]["delta"].get("content", "")
                first = first or (time.perf_counter() - begin if text else 0.0)
        await reader.readexactly(2)
    took = time.perf_counter() - begin
    load.seconds.append(took)
    load.first.append(first or took)
    load.said[talk] = text
    return True


@contextlib.contextmanager
def server(options: argparse.Namespace, batch: int) -> Iterator[int]:
    """Starts a server in a separate process; yields its port."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    path = os.pathsep.join(filter(None, (str(_ROOT), os.environ.get("PYTHONPATH"))))
    command = [sys.executable, "-m", "empax.serve", options.model, f"--port={port}", f"--batch={batch}",
               "--rate=0", f"--queue={options.users}"]  # fmt: skip
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": path}, stdout=log, stderr=log)
        _SERVERS[port] = process.pid
        try:
            begin = time.monotonic()
            while not _answers(port):
                if process.poll() is not None or time.monotonic() - begin > _PATIENCE:
                    log.seek(0)
                    raise RuntimeError(f"the server did not start:\n{log.read()[-2000:].decode()}")
                time.sleep(0.1)
            yield port
        finally:
            process.terminate()
            process.wait(60)


_SERVERS: dict[int, int] = {}


def _answers(port: int) -> bool:
    """Whether the server answers; it takes the port before its model is loaded."""
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=1)) as asked:
        try:
            asked.request("GET", "/healthz")
            return asked.getresponse().status == 200
        except (OSError, http.client.HTTPException):
            return False


def _resident_megabytes(port: int) -> float:
    """Returns the resident memory of the server, in 10**6 bytes."""
    pages = int(Path(f"/proc/{_SERVERS[port]}/statm").read_text(encoding="utf-8").split()[1])
    return round(pages * os.sysconf("SC_PAGE_SIZE") / 1e6, 1)


def tiny_model(folder: Path) -> Path:
    """Writes a random T5 with a small vocabulary, for --smoke."""
    import transformers

    tokenizer = texts.tokenizer_of(texts.instances("", "test"), 320)
    fields = {**fields_of("t5-small", small=True), "vocab_size": tokenizer.vocab_size, "decoder_start_token_id": 0}
    fields.pop("model_type")
    transformers.T5ForConditionalGeneration(transformers.T5Config(**fields)).save_pretrained(folder / "tiny")
    tokenizer.save(folder / "tiny")
    return folder / "tiny"


if __name__ == "__main__":
    main()
