"""Renders a chat template in a separate process: Python runs this file, no module of empax imports it.

A template comes with a model, from somebody else: it may never end, or fill the memory. Here it has limits, and a crash
of this process does not affect the other. Reads one JSON object from standard input, writes a list to standard output.

The environment is that of transformers (`apply_chat_template`), except for the date.
"""

from __future__ import annotations

import datetime
import json
import resource
import sys
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
import jinja2.utils


class _Generation(jinja2.ext.Extension):
    """`{% generation %}…{% endgeneration %}`, which marks the model's text in training data: renders its body."""

    tags = {"generation"}  # noqa: RUF012  # as Jinja declares it

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller: Any) -> str:
        return caller()


class _Namespace(jinja2.utils.Namespace):
    """A namespace of a template; names must not begin with an underscore, which has a meaning in Python."""

    def __init__(*args: Any, **values: Any):
        self, *given = args
        values = dict(*given, **values)
        for name in values:
            _check_name(name)
        jinja2.utils.Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace has no attribute that begins with '_': {name!r}.")


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def environment() -> jinja2.Environment:
    """Builds the Jinja environment of a template."""
    made = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    made.filters["tojson"] = _to_json
    made.globals |= {
        "raise_exception": _raise,
        # Some templates put today's date into the prompt; a run must not depend on the day.
        "strftime_now": datetime.datetime(2025, 1, 1).strftime,
        "dict": lambda *args, **values: dict(*args, **values),
        "namespace": _Namespace,
    }
    return made


def _limit(cpu_seconds: int, memory_bytes: int) -> None:
    for what, most in (("RLIMIT_CPU", cpu_seconds), ("RLIMIT_AS", memory_bytes), ("RLIMIT_CORE", 0)):
        _, hard = resource.getrlimit(getattr(resource, what))
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        try:
            resource.setrlimit(getattr(resource, what), (most, hard))
        except (ValueError, OSError):  # macOS refuses some limits
            continue


def _rendered(request: dict[str, Any], messages: list[dict[str, str]]) -> dict[str, str]:
    """Returns the chat under "text", or the reason for a failure under "error"."""
    try:
        template = environment().from_string(request["source"])
        values = request["tokens"] | {"messages": messages, "tools": None, "documents": None}
        text = template.render(**values, add_generation_prompt=True)
    except Exception as error:  # any error must reach the other process
        return {"error": f"{type(error).__name__}: {error}"[:500]}
    if len(text) > request["most_characters"]:
        return {"error": f"a chat of {len(messages)} short turns is more than {request['most_characters']} characters"}
    return {"text": text}


if __name__ == "__main__":
    asked = json.load(sys.stdin)
    _limit(asked["cpu_seconds"], asked["memory_bytes"])
    json.dump([_rendered(asked, chat) for chat in asked["chats"]], sys.stdout)
