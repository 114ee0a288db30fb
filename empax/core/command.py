"""What all commands share: flags, settings on the command line, and one-line errors."""

from __future__ import annotations

import contextlib
import functools
import io
import os
import re
import sys
from collections.abc import Callable, Iterator
from typing import ParamSpec

from absl import app, flags

from empax.core.config import ConfigError, UserError
from empax.core.recipe import split_overrides
from empax.core.text_files import message_of

P = ParamSpec("P")


def in_one_line(main: Callable[P, int | None]) -> Callable[P, int | None]:
    """Wraps `main` so that it prints user errors in one line and returns 2."""

    @functools.wraps(main)
    def run(*args: P.args, **kwargs: P.kwargs) -> int | None:
        try:
            return main(*args, **kwargs)
        except BrokenPipeError:
            raise
        except (UserError, OSError) as error:
            return _say(error)

    return run


def _say(error: Exception) -> int:
    print(f"error: {message_of(error)}", file=sys.stderr)
    return 2


def take_any_text() -> None:
    """Replaces invalid input, and characters that a terminal cannot show, so that neither ends the command."""
    for stream in (sys.stdin, sys.stdout):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Ends with code 130 and one line on Ctrl-C, and with 141 once nobody reads the output (`empax ... | head`)."""
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for Python's own flush at exit
        sys.exit(141)


def run_command(
    main: Callable[[list[str]], int | None],
    module: str,
    *,
    takes_words: bool = False,
    overrides: dict[str, str] | None = None,
) -> None:
    """Runs `main` with the flags of the command line; exits with its return value, or with 130 on Ctrl-C.

    Args:
      main: function of the words that are no flags; the command's own name comes first.
      module: `__name__` of the command's module, which defines its flags.
      takes_words: whether such words are allowed; flags may follow them.
      overrides: receives the settings of the command line, `--config.a.b=VALUE`; None = the command takes none.
    """
    words = None
    if overrides is not None:
        try:
            words, values = split_overrides(sys.argv)
        except ConfigError as error:
            sys.exit(_say(error))
        overrides.update(values)
    flags.FLAGS.set_gnu_getopt()
    take_any_text()
    with interruptible():
        app.run(main, argv=words, flags_parser=functools.partial(_parse_flags, module=module, takes_words=takes_words))


def _parse_flags(argv: list[str], *, module: str, takes_words: bool) -> list[str]:
    """Returns the words left after absl has parsed its flags; exits with code 2 on a wrong or missing flag or word.

    On --help, prints the command's description and flags, and exits with code 0.
    """
    if {"--help", "-help", "-h"} & set(argv[1 : argv.index("--") if "--" in argv else None]):
        own = flags.FLAGS.main_module_help() if module == "__main__" else flags.FLAGS.module_help(module)
        _, _, listed = own.strip().partition("\n")  # without the module name
        print(f"{(sys.modules[module].__doc__ or '').strip()}\n\nflags:\n{listed}")
        sys.exit(0)
    try:
        left = flags.FLAGS(argv)
    except flags.Error as error:
        sys.exit(_say(_needed(error)))
    if len(left) > 1 and not takes_words:
        sys.exit(_say(ConfigError(f"unexpected argument {left[1]!r}; options start with --.")))
    return left


def _needed(error: flags.Error) -> Exception:
    """Replaces absl's error about a required flag by one with the flag's description."""
    if not (found := re.match(r"flag --(\w+)=None: ", str(error))):
        return error
    about = flags.FLAGS[found[1]].help
    return ConfigError(f"--{found[1]} is needed: {about[0].lower()}{about[1:]}")
