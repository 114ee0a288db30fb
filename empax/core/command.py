"""What all commands share: flags, settings on the command line, and errors in one line."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from typing import ParamSpec

from absl import app, flags

from empax.core.config import ConfigError, UserError
from empax.core.recipe import split_overrides
from empax.core.text_files import message_of

P = ParamSpec("P")


def in_one_line(main: Callable[P, int | None]) -> Callable[P, int | None]:
    """`main`, which says in one line what its user can mend and then returns 2."""

    @functools.wraps(main)
    def run(*args: P.args, **kwargs: P.kwargs) -> int | None:
        try:
            return main(*args, **kwargs)
        except (UserError, OSError) as error:
            return _say(error)

    return run


def _say(error: Exception) -> int:
    print(f"error: {message_of(error)}", file=sys.stderr)
    return 2


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Ctrl-C within says so in one line and ends the process with exit code 130."""
    try:
        yield
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        sys.exit(130)


def run_command(
    main: Callable[[list[str]], int | None],
    module: str,
    *,
    anywhere: bool = False,
    overrides: dict[str, str] | None = None,
) -> None:
    """Runs `main` with the flags of the command line, and exits with what it returns, or with 130 at Ctrl-C.

    Args:
      main: of the words that are no flags, the command's own before them.
      module: `__name__` of the command's module, which defines its flags.
      anywhere: whether flags may stand behind words.
      overrides: gets the settings of the command line, `--config.a.b=VALUE`; None = it takes none.
    """
    words = None
    if overrides is not None:
        try:
            words, values = split_overrides(sys.argv)
        except ConfigError as error:
            sys.exit(_say(error))
        overrides.update(values)
    if anywhere:
        flags.FLAGS.set_gnu_getopt()
    with interruptible():
        app.run(main, argv=words, flags_parser=functools.partial(_parse_flags, module=module))


def _parse_flags(argv: list[str], *, module: str) -> list[str]:
    """What is left of the command line when absl has taken its flags; exit code 2 at a flag that it does not know.

    At --help, says what the command does and lists its flags, and ends with exit code 0.
    """
    if {"--help", "-help", "-h"} & set(argv[1 : argv.index("--") if "--" in argv else None]):
        own = flags.FLAGS.main_module_help() if module == "__main__" else flags.FLAGS.module_help(module)
        _, _, listed = own.strip().partition("\n")  # without the name of the module
        print(f"{(sys.modules[module].__doc__ or '').strip()}\n\nflags:\n{listed}")
        sys.exit(0)
    try:
        return flags.FLAGS(argv)
    except flags.Error as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
