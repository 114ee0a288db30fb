"""Analyses the text of a compiled program: matrix products, memory traffic and collectives, including loop trip counts.

The compiler's own cost analysis counts a loop body once. Here every computation counts as often as it runs.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator

import numpy as np

from empax.planning.hlo_text import (
    NAME,
    Computation,
    Instruction,
    array_bytes,
    arrays_of,
    attribute,
    dims_of,
    parse,
    type_bytes,
)

COLLECTIVES = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")

_NO_TRAFFIC = ("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "while", "conditional", "call",
               "after-all", "iota", "partition-id", "async-start", "opt-barrier")  # fmt: skip
_BEGUN_BEFORE = ("-done", "-update")  # name endings of operations that are counted at their start


@dataclasses.dataclass(frozen=True)
class Collective:
    """Collectives of one kind.

    Attributes:
      kind: one of COLLECTIVES.
      count: number of executions in one run of the program.
      bytes: bytes of the larger side on one device (the gathered or reduced array), summed over all executions.
      largest: bytes of the largest such array in one execution.
      group: number of communicating devices.
      sent: bytes that a device sends in a ring algorithm, summed over all executions.
    """

    kind: str
    count: int
    bytes: float
    largest: float
    group: int
    sent: float


@dataclasses.dataclass(frozen=True)
class Work:
    """The work of one run of a program on one device.

    Attributes:
      flops: FLOPs of matrix products and convolutions.
      hbm_bytes: bytes that operations read from and write to main memory, without values that stay in fast memory.
      collectives: collectives by kind and group size.
    """

    flops: float
    hbm_bytes: float
    collectives: tuple[Collective, ...]


class Program:
    """A compiled module, from `jax.stages.Compiled.as_text()`.

    Raises:
      ValueError: the text is not a module, or a loop's trip count is unknown.
    """

    def __init__(self, text: str):
        self.computations, self.entry = parse(text)

    def work(self) -> Work:
        """Counts the work of one run; see `Work`."""
        flops, traffic = self._cost(self.entry)
        found: dict[tuple[str, int], Collective] = {}
        seen: set[tuple[str, float]] = set()
        for name, times, _ in self._runs(self.entry, 1.0, fused=False):
            for one in self.computations[name].instructions.values():
                if (kind := one.opcode) not in COLLECTIVES:
                    continue
                if kind == "all-reduce" and "reduce-scatter" in name:  # TPUs reduce and keep a slice
                    kind = "reduce-scatter"
                # An asynchronous collective is listed at its start, its updates and its end.
                channel = attribute(one, "channel_id")
                if channel and (channel, times) in seen:
                    continue
                seen.add((channel, times))
                size, group = self._size(name, one), _group_size(one)
                before = found.get((kind, group)) or Collective(kind, 0, 0.0, 0.0, group, 0.0)
                found[kind, group] = Collective(
                    kind,
                    before.count + round(times),
                    before.bytes + times * size,
                    max(before.largest, size),
                    group,
                    before.sent + times * size * _sent_share(kind, group),
                )
        return Work(flops, traffic, tuple(sorted(found.values(), key=lambda one: (-one.bytes, one.kind))))

    def _runs(self, name: str, times: float, *, fused: bool) -> Iterator[tuple[str, float, bool]]:
        """Yields each computation below `name`, how often it runs and whether it is fused; costliest branches only."""
        yield name, times, fused
        for one in self.computations[name].instructions.values():
            if one.opcode == "while":
                body, condition = attribute(one, "body"), attribute(one, "condition")
                yield from self._runs(body, times * self._trips(name, one, condition), fused=fused)
            elif one.opcode == "conditional":
                branches = re.findall(r"(?:branch_computations=\{([^}]*)\}|(?:true|false)_computation=(%[\w.\-]+))",
                                      one.attributes)  # fmt: skip
                names = NAME.findall(" ".join(" ".join(pair) for pair in branches))
                yield from self._runs(max(names, key=self._cost), times, fused=fused)
            elif callee := attribute(one, "calls") or (attribute(one, "to_apply") if one.opcode == "call" else ""):
                yield from self._runs(callee, times, fused=fused or one.opcode == "fusion")

    def _cost(self, name: str) -> tuple[float, float]:
        """Returns FLOPs and bytes of memory traffic of one run of a computation."""
        flops = traffic = 0.0
        for below, times, fused in self._runs(name, 1.0, fused=False):
            for one in self.computations[below].instructions.values():
                flops += times * self._flops(below, one)
                if not fused:
                    traffic += times * self._traffic(below, one)
        return flops, traffic

    def _trips(self, name: str, loop: Instruction, condition: str) -> int:
        if known := re.search(r'known_trip_count"?:\s*\{"?n"?:\s*"?(\d+)', loop.attributes):
            return int(known.group(1))
        inner = self.computations[condition]
        compare, arguments = inner.root, None
        if compare.opcode == "fusion":
            arguments = compare.operands
            inner = self.computations[attribute(compare, "calls")]
            compare = inner.root
        limits = [self._constant(inner, operand, name, loop) for operand in compare.operands]
        bounds = [limit for limit in limits if limit is not None]
        if compare.opcode != "compare" or not bounds:
            raise ValueError(f"cannot tell how often the loop {loop.name} runs: {compare.text}")
        counter = inner.instructions[compare.operands[limits.index(None)]] if None in limits else None
        if counter is not None and counter.opcode == "parameter" and arguments is not None:
            counter = self.computations[condition].instructions[arguments[int(counter.text)]]
        stop = bounds[-1] + ("direction=LE" in compare.attributes)
        if counter is None or counter.opcode != "get-tuple-element":
            return stop
        start, step = self._counting(name, loop, int(attribute(counter, "index")))
        return -(-(stop - start) // step)

    def _stays(self, loop: Instruction, index: int) -> bool:
        """Whether an iteration leaves that element of the loop's state unchanged; it changes the loop counter."""
        body = self.computations[attribute(loop, "body")]
        if body.root.opcode != "tuple":
            return False
        kept = _through_bitcasts(body, body.root.operands[index])
        return kept.opcode == "get-tuple-element" and int(attribute(kept, "index")) == index

    def _counting(self, name: str, loop: Instruction, index: int) -> tuple[int, int]:
        """Returns the initial value of an element of a loop's state and its increment; 0 and 1 if they are unclear."""
        given = self.computations[name].instructions[loop.operands[0]]
        first = given.operands[index] if given.opcode == "tuple" else ""
        start = self._literal(self.computations[name], first) if first else None
        body = self.computations[attribute(loop, "body")]
        added = body.instructions[body.root.operands[index]] if body.root.opcode == "tuple" else body.root
        steps: list[int | None] = []
        if added.opcode == "add":
            steps = [self._literal(body, operand) for operand in added.operands]
        elif added.opcode == "fusion":
            inner = self.computations[attribute(added, "calls")]
            if inner.root.opcode == "add":
                steps = [self._literal(inner, operand) for operand in inner.root.operands]
        step = next((step for step in steps if step), 1)
        return start or 0, step

    @staticmethod
    def _literal(inner: Computation, name: str) -> int | None:
        one = inner.instructions[name]
        while one.opcode in ("copy", "bitcast"):
            one = inner.instructions[one.operands[0]]
        return int(one.text) if one.opcode == "constant" and re.fullmatch(r"-?\d+", one.text) else None

    def _constant(self, inner: Computation, operand: str, outer: str, loop: Instruction) -> int | None:
        """Returns a constant of a condition, literal or from the loop's initial tuple; None if it is no constant."""
        literal, one = self._literal(inner, operand), inner.instructions[operand]
        if literal is not None or one.opcode != "get-tuple-element":
            return literal
        start = self.computations[outer].instructions[loop.operands[0]]
        index = int(attribute(one, "index"))
        if start.opcode != "tuple" or not self._stays(loop, index):
            return None
        source = start.operands[index]
        if self.computations[outer].instructions[source].opcode == "parameter":
            return None
        return self._constant(self.computations[outer], source, outer, loop)

    def _flops(self, name: str, one: Instruction) -> float:
        if one.opcode == "dot":
            left = dims_of(self._type(name, one.operands[0]))
            axes = attribute(one, "lhs_contracting_dims", r"\{([\d,]*)\}")
            contracted = math.prod(left[int(axis)] for axis in axes.split(",") if axis)
            return 2.0 * math.prod(dims_of(one.type)) * contracted
        if one.opcode == "convolution":
            source, kernel = (dims_of(self._type(name, operand)) for operand in one.operands[:2])
            return _convolution_flops(one, source, kernel)
        if one.opcode == "custom-call" and (products := _products_of_attention(one)):
            query, key = (dims_of(self._type(name, operand)) for operand in one.operands[:2])
            return 2.0 * products * math.prod(query) * key[2]
        return 0.0

    def _traffic(self, name: str, one: Instruction) -> float:
        if one.opcode in _NO_TRAFFIC or one.opcode.endswith(_BEGUN_BEFORE):
            return 0.0
        if one.opcode == "fusion":
            return self._fusion_traffic(name, one)
        if one.opcode in ("dynamic-slice", "slice"):
            return 2 * type_bytes(one.type, hbm=True)
        if one.opcode == "dynamic-update-slice":
            return 2 * type_bytes(self._type(name, one.operands[1]), hbm=True)
        inward = sum(type_bytes(self._type(name, operand), hbm=True) for operand in one.operands)
        return inward + type_bytes(one.type, hbm=True)

    def _fusion_traffic(self, name: str, one: Instruction) -> float:
        """Counts operands and results; of sliced operands only the slices, of values updated in place only the updates.

        Values that only pass through, like the buffers of an asynchronous collective, cost nothing.
        """
        inner = self.computations[attribute(one, "calls")]
        total, updated = 0.0, set()
        for part in inner.instructions.values():
            if part.opcode != "dynamic-update-slice":
                continue
            target = _through_bitcasts(inner, part.operands[0])
            if target.opcode == "parameter":
                updated.add(target.name)
                total += 2 * type_bytes(inner.instructions[part.operands[1]].type)
        in_place = sum(type_bytes(inner.instructions[parameter].type) for parameter in updated)
        results = arrays_of(one.type)
        if inner.root.opcode == "tuple" and len(inner.root.operands) == len(results):
            made = [_through_bitcasts(inner, operand).opcode != "parameter" for operand in inner.root.operands]
            results = [array for array, kept in zip(results, made, strict=True) if kept]
        for part in inner.instructions.values():
            if part.opcode != "parameter" or part.name in updated:
                continue
            outside = self._type(name, one.operands[int(part.text)])
            if whole := type_bytes(outside, hbm=True):
                total += min(self._read(inner, part), whole)
        return total + max(sum(array_bytes(array, hbm=True) for array in results) - in_place, 0.0)

    def _read(self, inner: Computation, value: Instruction) -> float:
        """Returns the bytes of a value that a fused computation reads, including nested fusions."""
        total = 0.0
        for user in inner.users(value.name):
            if user.opcode in ("dynamic-slice", "slice"):
                total += type_bytes(user.type)
            elif user.opcode == "fusion":
                nested = self.computations[attribute(user, "calls")]
                for part in nested.instructions.values():
                    if part.opcode == "parameter" and _through_bitcasts(inner, user.operands[int(part.text)]) is value:
                        total += self._read(nested, part)
            elif not (user.root and user.opcode == "tuple"):
                total += type_bytes(value.type)
        return total

    def _size(self, name: str, one: Instruction) -> float:
        """Returns the bytes of a collective's larger side."""
        return max(sum(type_bytes(self._type(name, operand)) for operand in one.operands), type_bytes(one.type))

    def _type(self, name: str, operand: str) -> str:
        return self.computations[name].instructions[operand].type


def _products_of_attention(kernel: Instruction) -> int:
    """Returns the number of products [B, H, T, S] x head size in JAX's TPU attention kernel; skipped blocks count."""
    made = {"flash_mha_bwd_dkv": 4, "flash_mha_bwd_dq": 3, "flash_attention": 2}
    return next((count for name, count in made.items() if name in attribute(kernel, "op_name", r"\"([^\"]*)\"")), 0)


def _convolution_flops(one: Instruction, source: list[int], kernel: list[int]) -> float:
    """Counts only products with an element of the source: TPUs write the batch axes of a product as a dilated axis,
    where all but one position of the window fall on holes."""
    labels = attribute(one, "dim_labels", r"([\w?]+_[\w?]+->[\w?]+)")
    of_source, rest = labels.split("_")
    of_kernel, of_result = rest.split("->")
    result = dims_of(one.type)
    products = kernel[of_kernel.index("i")] * math.prod(result[of_result.index(axis)] for axis in "bf")
    axes = sorted(set(of_kernel) - {"i", "o"})
    window = {key: _window(one, key, len(axes)) for key in ("stride", "pad", "lhs_dilate", "rhs_dilate")}
    for number, axis in enumerate(axes):
        stride, before, holes, apart = (window[key][number] for key in ("stride", "pad", "lhs_dilate", "rhs_dilate"))
        first = np.arange(result[of_result.index(axis)])[:, None] * stride - before
        place = first + np.arange(kernel[of_kernel.index(axis)])[None] * apart
        inside = (place >= 0) & (place <= (source[of_source.index(axis)] - 1) * holes) & (place % holes == 0)
        products *= int(inside.sum())
    return 2.0 * products


def _window(one: Instruction, key: str, axes: int) -> list[int]:
    """Parses a field of window={...} for every axis; for padding, the part before the data."""
    found = re.search(rf"\b{key}=([\d_x\-]+)", attribute(one, "window", r"\{([^}]*)\}"))
    if not found:
        return [0 if key == "pad" else 1] * axes
    return [int(value.partition("_")[0]) for value in found.group(1).split("x")]


def _through_bitcasts(inner: Computation, name: str) -> Instruction:
    one = inner.instructions[name]
    return _through_bitcasts(inner, one.operands[0]) if one.opcode == "bitcast" else one


def _group_size(one: Instruction) -> int:
    """Returns the group size in {{0,1},{2,3}}, [2,2]<=[4] or mesh['a'=2,'b'=4] {'b'}."""
    if found := re.search(r"replica_groups=\{\{([\d,]*)\}", one.attributes):
        return len(found.group(1).split(","))
    if found := re.search(r"replica_groups=\[\d+,(\d+)\]", one.attributes):
        return int(found.group(1))
    if found := re.search(r"replica_groups=mesh\[([^\]]*)\]\s*\{([^}]*)\}", one.attributes):
        sizes = dict(re.findall(r"'([^']+)'=(\d+)", found.group(1)))
        return math.prod(int(sizes[name]) for name in re.findall(r"'([^']+)'", found.group(2)))
    return 2  # a permutation has one sender and one receiver


def _sent_share(kind: str, group: int) -> float:
    """Returns the bytes that a device sends in a ring, divided by the bytes of the larger side."""
    if kind == "collective-permute":
        return 1.0
    return (2.0 if kind == "all-reduce" else 1.0) * (group - 1) / group
