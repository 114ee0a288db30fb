"""Parses the text of a compiled program: computations, their instructions, the sizes of their types."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator

_BYTES = {
    "pred": 1, "s4": 0.5, "u4": 0.5, "s8": 1, "u8": 1, "f8e4m3fn": 1, "f8e5m2": 1, "s16": 2, "u16": 2, "bf16": 2,
    "f16": 2, "s32": 4, "u32": 4, "f32": 4, "s64": 8, "u64": 8, "f64": 8, "c64": 8, "token": 0, "opaque": 0,
}  # fmt: skip


_ARRAY = re.compile(r"([a-z]\w*)\[([\d,]*)\](\{[^}]*\})?")


NAME = re.compile(r"%([\w.\-]+)")


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of a computation."""

    name: str
    type: str
    opcode: str
    operands: tuple[str, ...]
    text: str  # text between the operation's parentheses
    attributes: str
    root: bool


@dataclasses.dataclass(frozen=True)
class Computation:
    """The instructions of a computation by name, in order."""

    instructions: dict[str, Instruction]

    @property
    def root(self) -> Instruction:
        return next(one for one in self.instructions.values() if one.root)

    def users(self, name: str) -> Iterator[Instruction]:
        """Yields the users of a value, looking through bitcasts."""
        for one in self.instructions.values():
            if name in one.operands:
                if one.opcode == "bitcast" and not one.root:
                    yield from self.users(one.name)
                else:
                    yield one


def parse(text: str) -> tuple[dict[str, Computation], str]:
    """Parses the computations of a program by name, and the name of its entry computation."""
    computations: dict[str, Computation] = {}
    entry = name = ""
    found: dict[str, Instruction] = {}
    for line in text.splitlines():
        if line.startswith(("%", "ENTRY")) and line.rstrip().endswith("{"):
            name = NAME.search(line).group(1)  # type: ignore[union-attr]
            entry, found = (name if line.startswith("ENTRY") else entry), {}
        elif line.startswith("}"):
            computations[name] = Computation(found)
        elif " = " in line and line.startswith(" "):
            one = _instruction(line)
            found[one.name] = one
    if not entry:
        raise ValueError("this is not the text of a compiled module: it has no ENTRY.")
    return computations, entry


def _instruction(line: str) -> Instruction:
    head, rest = re.sub(r"/\*.*?\*/", "", line).split(" = ", 1)
    end = _balanced(rest, 0) if rest.startswith("(") else rest.index(" ")
    kind, rest = rest[:end], rest[end:].lstrip()
    start = rest.index("(")
    end = _balanced(rest, start)
    inside = rest[start + 1 : end - 1]
    name = NAME.search(head)
    assert name is not None
    operands = tuple(NAME.findall(inside))
    root = head.lstrip().startswith("ROOT")
    return _started(Instruction(name.group(1), kind, rest[:start], operands, inside, rest[end:], root))


def _started(one: Instruction) -> Instruction:
    """Replaces the start of an asynchronous operation by the operation itself, with only its result as type.

    A start has the type (operands, result, marks); but a copy has (result, operand, mark), and an all-reduce has its
    result. The operation of an `async-start` is a separate computation, and counted there.
    """
    opcode = one.opcode.removesuffix("-start")
    if opcode in (one.opcode, "async"):
        return one
    kind = one.type if opcode == "all-reduce" else elements(one.type)[0 if opcode == "copy" else 1]
    return dataclasses.replace(one, opcode=opcode, type=kind)


def elements(kind: str) -> list[str]:
    """Splits a tuple type into its element types."""
    parts, depth, start = [], 0, 1
    for i, letter in enumerate(kind):
        depth += (letter in "({[") - (letter in ")}]")
        if (letter == "," and depth == 1) or depth == 0:
            parts.append(kind[start:i])
            start = i + 1
    return parts


def _balanced(text: str, start: int) -> int:
    """Returns the position after the parenthesis that closes the one at `start`."""
    depth = 0
    for i in range(start, len(text)):
        depth += (text[i] == "(") - (text[i] == ")")
        if depth == 0:
            return i + 1
    raise ValueError(f"a parenthesis is never closed: {text[:200]}")


def attribute(one: Instruction, name: str, value: str = r"%?([\w.\-]+)") -> str:
    """Returns the value of an instruction's attribute; empty if it has none of that name."""
    found = re.search(rf"\b{name}={value}", one.attributes)
    return found.group(1) if found else ""


def arrays_of(kind: str) -> list[tuple[str, str, str]]:
    """Returns the arrays of a type: element type, sizes, layout."""
    return _ARRAY.findall(kind)


def array_bytes(array: tuple[str, str, str], *, hbm: bool = False) -> float:
    """Returns the bytes of one array of `arrays_of`; with `hbm`, 0 for an array outside main memory."""
    dtype, dims, layout = array
    if hbm and re.search(r"S\([1-9]", layout):
        return 0.0
    return _BYTES.get(dtype, 4) * math.prod(int(size) for size in dims.split(",") if size)


def type_bytes(kind: str, *, hbm: bool = False) -> float:
    """Returns the bytes of all arrays of a type; with `hbm`, only of arrays in main memory."""
    return sum(array_bytes(array, hbm=hbm) for array in arrays_of(kind))


def dims_of(kind: str) -> list[int]:
    """Returns the sizes of the first array of a type."""
    return [int(size) for size in arrays_of(kind)[0][1].split(",") if size]
