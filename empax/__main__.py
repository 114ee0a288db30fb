"""`empax COMMAND ...` or `python -m empax COMMAND ...`: dispatches the command's name and its flags."""

from __future__ import annotations

import importlib
import sys
from typing import NamedTuple

import empax


class _Command(NamedTuple):
    module: str
    does: str
    example: str


_COMMANDS = {
    "demo": _Command("demo", "answer one message at once, from published weights", 'empax demo "I lost my keys."'),
    "run": _Command("main", "run a recipe, or continue a run", "empax run reg_transformer:tiny --workdir=runs/trial"),
    "plan": _Command("main", "show what a recipe would do; allocate nothing", "empax plan reg_t5:base"),
    "sweep": _Command(
        "sweep",
        "run a recipe for each of several settings and seeds",
        "empax sweep reg_transformer --grid joint.steps=1000,2000 --seeds=3",
    ),
    "evaluate": _Command("evaluate", "score files of predictions and compare them", "empax evaluate A.jsonl B.jsonl"),
    "chat": _Command("chat", "talk to a finished run", "empax chat --workdir=runs/trial"),
    "serve": _Command("serve", "serve a chat page and OpenAI's endpoints", "empax serve empathetic-t5-small"),
    "export": _Command(
        "export", "write a run's model for other libraries", "empax export --workdir=runs/trial --output=model"
    ),
    "rate": _Command(
        "rate",
        "have people rate replies, and count the answers",
        "empax rate make A=a.jsonl B=b.jsonl --output=DIR",
    ),
    "judges": _Command("judges", "check the judges of empathy against human ratings", "empax judges --data=DATA"),
}


def listing() -> str:
    """Lists the commands, one per line, with examples."""
    lines = "\n".join(f"  {name:<10}{command.does}" for name, command in _COMMANDS.items())
    examples = "\n".join(f"  {command.example}" for command in _COMMANDS.values())
    more = "empax COMMAND --help lists the flags of a command; empax --version shows the version."
    return f"usage: empax COMMAND ...\n\n{lines}\n\n{examples}\n\n{more}"


def main() -> None:
    """Runs the command that the first word of the command line names."""
    name, words = (sys.argv[1:2] or [""])[0], sys.argv[2:]
    if name in ("--version", "version"):
        print(f"empax {empax.__version__}")
        return
    if name not in _COMMANDS:
        asked = name in ("", "help", "-h", "--help")
        print(listing() if asked else f"error: {name!r} is not a command of empax.\n{listing()}",
              file=sys.stdout if asked else sys.stderr)  # fmt: skip
        sys.exit(0 if asked else 2)
    if name in ("run", "plan", "sweep") and words and not words[0].startswith("-"):
        words[0] = f"--config={words[0]}"
    if name == "plan":
        words.append("--mode=plan")
    sys.argv = [f"empax {name}", *words]
    importlib.import_module(f"empax.{_COMMANDS[name].module}").command_line()


if __name__ == "__main__":
    main()
