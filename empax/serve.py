r"""Serves a model or a finished run: a chat page and OpenAI's endpoints.

  empax serve empathetic-t5-small                  # then open http://127.0.0.1:8000
  empax serve runs/reg_t5 --compare=runs/emprl_t5  # two side by side, blinded, with a vote
  empax serve minilm                               # an encoder: /v1/embeddings
  empax serve --watch runs/reg_t5                  # curves of a run while it trains

It accepts the same names as `empax.load`: published names, folders, wheels, work directories. It needs `pip install
'empax[serve]'`. Messages that suggest self-harm or danger get a fixed answer that names help (docs/intended-use.md).
More: docs/serving.md.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import os
import socket
import sys
import threading
from typing import Any

from absl import flags

from empax.core.command import in_one_line, run_command
from empax.core.memory import keep_freed_memory

_COMPARE = flags.DEFINE_string("compare", None, "A second model or run, to compare with the first.")
_HOST = flags.DEFINE_string("host", "127.0.0.1", "The address to listen on; any but this machine's own needs a token.")
_PORT = flags.DEFINE_integer("port", 8000, "The port to listen on.", lower_bound=0, upper_bound=65535)
_TOKEN = flags.DEFINE_string("token", None, "Token that requests must carry; better set as EMPAX_TOKEN.")
_BATCH = flags.DEFINE_integer("batch", 8, "Replies that a model generates at once.", lower_bound=1, upper_bound=256)
_QUEUE = flags.DEFINE_integer("queue", 64, "How many replies may wait; others get 503.", lower_bound=1)
_RATE = flags.DEFINE_integer("rate", 120, "Requests that one address may post a minute; 0 = no limit.", lower_bound=0)
_MAX_TOKENS = flags.DEFINE_integer(
    "max_tokens", 256, "Maximum tokens of a model's reply; a run has its own limit.", lower_bound=1, upper_bound=4096
)
_VOTES = flags.DEFINE_string("votes", "votes", "With --compare: the folder for votes.")
_WATCH = flags.DEFINE_boolean("watch", False, "Show how a run trains instead of serving its replies.")
_REPLIES = flags.DEFINE_integer("replies", 3, "With --watch: contexts to answer after each checkpoint.", lower_bound=0)
_LOG_TEXTS = flags.DEFINE_boolean("log_texts", False, "Whether to log messages and replies.")
_SAFETY = flags.DEFINE_boolean("safety", True, "Whether messages that seem to speak of danger get a fixed answer.")

LOCAL = ("127.0.0.1", "localhost", "::1")
_STOP_SECONDS = 30


@in_one_line
def main(argv: list[str]) -> None:
    # Imported here so that --help answers at once.
    import jax

    from empax.core.cache import enable_compilation_cache
    from empax.pipeline.run import quiet_logging

    if _WATCH.value:
        jax.config.update("jax_platforms", "cpu")  # the training run uses the accelerators
    keep_freed_memory()
    quiet_logging()
    enable_compilation_cache()
    serve(*_application(argv[1:]))


def _application(names: list[str]) -> tuple[Any, socket.socket]:
    """Returns the application and a bound socket; raises ConfigError before anything is loaded."""
    from empax.core.config import ConfigError
    from empax.core.paths import expand

    if len(names) != 1:
        raise ConfigError("name one model or run, such as: empax serve empathetic-t5-small")
    token = _TOKEN.value or os.environ.get("EMPAX_TOKEN", "")
    if _HOST.value not in LOCAL and not token:
        raise ConfigError(f"--host={_HOST.value} is open to others; set EMPAX_TOKEN, or use --host=127.0.0.1.")
    try:
        from empax.serving.web.app import ServerSettings, make_app, make_watch_app
    except ModuleNotFoundError as error:
        raise ConfigError(f"{error.name} is not installed; pip install 'empax[serve]' brings it.") from error
    from empax.serving.safety import announcement, answer_to_danger
    from empax.serving.web.systems import Asked, is_run, load_system, name_of
    from empax.serving.web.votes import check_compared

    before = answer_to_danger if _SAFETY.value else None
    settings = ServerSettings(
        token=token,
        places=_QUEUE.value,
        per_minute=_RATE.value,
        hosts=LOCAL if _HOST.value in LOCAL else (),
        log_texts=_LOG_TEXTS.value,
        votes=expand(_VOTES.value),
        watched_replies=_REPLIES.value,
    )
    wanted = [names[0], *([_COMPARE.value] if _COMPARE.value else [])]
    if _WATCH.value:
        answering = (_COMPARE, _VOTES, _BATCH, _MAX_TOKENS, _QUEUE, _RATE, _SAFETY, _LOG_TEXTS)
        idle = {"--watch shows how a run trains": answering}
    else:
        idle = {"without --watch nothing trains": (_REPLIES,)}
        idle |= {} if _COMPARE.value else {"without --compare nobody votes": (_VOTES,)}
        idle |= {"a run has its own limit": (_MAX_TOKENS,)} if all(map(is_run, wanted)) else {}
    for what, of in idle.items():
        if given := [f"--{flag.name}" for flag in of if flag.value != flag.default]:
            raise ConfigError(f"{what}, and {', '.join(given)} would do nothing; leave it out.")
    if _COMPARE.value:
        check_compared([name_of(name) for name in wanted], settings.votes)
    place = _place()
    if _WATCH.value:
        return make_watch_app(expand(names[0]), settings), place
    said = announcement() if before else "The model answers everything: --nosafety."
    settings = dataclasses.replace(settings, safety=said)
    systems = [load_system(n, batch_size=_BATCH.value, max_tokens=_MAX_TOKENS.value, before=before) for n in wanted]
    for system in systems:
        if system.options:  # an encoder has none
            print(f"compiles {system.name}, which takes longest when it is first served", file=sys.stderr, flush=True)
            for rows in {*(1 << n for n in range(system.batch_size.bit_length())), system.batch_size}:
                list(system.answer([Asked(("Hello.",), seed=0)] * rows))  # compiles
    return make_app(systems, settings), place


def _place() -> socket.socket:
    """Returns a socket that listens on --host and --port, so that no other server takes them while a model loads."""
    from empax.core.config import ConfigError

    place = socket.socket(socket.AF_INET6 if ":" in _HOST.value else socket.AF_INET)
    place.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        place.bind((_HOST.value, _PORT.value))
        place.listen()
    except OSError as error:
        place.close()
        where = f"--host={_HOST.value} --port={_PORT.value}"
        raise ConfigError(f"{where}: {error.strerror}; use another host or port (0 = a free one).") from error
    return place


def serve(application: Any, place: socket.socket) -> None:
    """Serves until SIGTERM or Ctrl-C; requests in progress are finished first."""
    import uvicorn

    logging.getLogger().setLevel(logging.WARNING)
    log = logging.getLogger("empax.serve")
    log.setLevel(logging.INFO)
    log.propagate = False
    log.addHandler(logging.StreamHandler(sys.stderr))
    log.handlers[-1].setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    config = uvicorn.Config(
        application, log_level="warning", access_log=False, server_header=False,
        timeout_graceful_shutdown=_STOP_SECONDS,
    )  # fmt: skip
    log.info("http://%s:%d", f"[{_HOST.value}]" if ":" in _HOST.value else _HOST.value, place.getsockname()[1])
    with contextlib.suppress(KeyboardInterrupt):  # raised again after everything has ended
        uvicorn.Server(config).run(sockets=[place])
    if threading.active_count() > 1:  # Python would wait for a batch that nobody needs any more
        os._exit(0)


command_line = functools.partial(run_command, main, __name__, takes_words=True)


if __name__ == "__main__":
    command_line()
