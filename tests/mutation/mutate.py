"""Mutation testing: changes one expression at a time in a copy of the tree and runs the tests of the changed module.

  python tests/mutation/mutate.py [--sample=30] [--seed=0] [--only=losses,decoding] [--jobs=1] [--tests=not slow]
                                  [--kept=FILE.jsonl]
  python tests/mutation/mutate.py --planted [--jobs=1]

A mutant counts as found if a test fails or runs out of time. One that survives the tests that mirror its module meets
those of its package and all that import the module. cosmic-ray makes the mutants. Annotations, decorators of data
classes, caches and compilation, and `strict=` of `zip` are left as they are: no result depends on them. harmless.jsonl
holds changes that no result depends on, each with the reason; survivors among them are counted apart. With --kept the
same command on the same tree goes on where it was stopped.

--planted plants the faults of planted.jsonl instead, which tests once did not notice: none may survive.
"""

from __future__ import annotations

import argparse
import ast
import collections
import concurrent.futures
import dataclasses
import difflib
import itertools
import json
import os
import queue
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TypeAlias

ROOT = Path(__file__).resolve().parents[2]

TARGETS: dict[str, tuple[str, ...]] = {
    "losses": ("empax/losses/*.py",),
    "decoding": ("empax/decoding/*.py",),
    "evaluation": (
        "empax/evaluation/[!p]*.py",
        "empax/evaluation/perplexity.py",
    ),  # without the table of published numbers
    "retrieval": ("empax/retrieval/*.py",),
    "files": ("empax/core/files.py", "empax/core/text_files.py"),
    "checkpoint": ("empax/training/checkpoint.py",),
}
"""The groups that are counted, and their modules."""

PLANTED = Path(__file__).with_name("planted.jsonl")
"""Rows with `module`, a `line` of it, what is `planted` in its place, and `why` that is wrong."""

HARMLESS = Path(__file__).with_name("harmless.jsonl")
"""Rows with `module`, `line` before the change, `operator`, and `why` no result depends on it."""

_LEFT_OUT = (
    "VariableReplacer",  # take arguments
    "VariableInserter",
    "Pow",  # powers, shifts and bits in place of a sum: whatever sees a difference instead of a sum sees these, too
    "LShift",
    "RShift",
    "BitOr",
    "BitAnd",
    "BitXor",
)


@dataclasses.dataclass(frozen=True)
class Mutant:
    """One change: what cosmic-ray's operator does at its n-th place in a module."""

    module: Path
    operator: str
    occurrence: int
    place: tuple[int, int]

    def diff(self) -> str:
        """The changed lines behind the place and the operator."""
        before, after = (text.splitlines() for text in (self.source(), self.apply()))
        lines = [line for line in difflib.unified_diff(before, after, n=0, lineterm="") if line[:2] not in ("--", "++")]
        place = f"{self.module.relative_to(ROOT)}:{self.place[0]} {self.operator.removeprefix('core/')}"
        return "\n    ".join([place, *(line for line in lines if not line.startswith("@@"))])

    def is_one(self) -> bool:
        """Whether it is a program, and another one: cosmic-ray takes the bare `*` of a signature for an operator."""
        try:
            before, after = ast.parse(self.source()), ast.parse(self.apply())
        except SyntaxError:
            return False
        return ast.dump(before) != ast.dump(after) and _kinds_of_arguments(before) == _kinds_of_arguments(after)

    def named(self) -> tuple[str, str, str]:
        """As HARMLESS names it: module, line before the change, operator."""
        line = self.source().splitlines()[self.place[0] - 1].strip()
        return str(self.module.relative_to(ROOT)), line, self.operator.removeprefix("core/")

    def source(self) -> str:
        return self.module.read_text(encoding="utf-8")

    def apply(self) -> str:
        from cosmic_ray.mutating import mutate_code
        from cosmic_ray.plugins import get_operator

        changed = mutate_code(self.source(), get_operator(self.operator)(), self.occurrence)
        if changed is None:
            raise RuntimeError(f"{self} changes nothing")
        return changed


@dataclasses.dataclass(frozen=True)
class Planted:
    """One fault that tests once did not notice: a line of a module and what stands in its place."""

    module: Path
    line: str
    planted: str
    why: str

    def diff(self) -> str:
        """Module, reason and both lines."""
        return f"{self.module.relative_to(ROOT)}: {self.why}\n    -{self.line}\n    +{self.planted}"

    def named(self) -> tuple[str, str, str]:
        """As a row of HARMLESS would name it."""
        return str(self.module.relative_to(ROOT)), self.line, "planted"

    def source(self) -> str:
        return self.module.read_text(encoding="utf-8")

    def apply(self) -> str:
        source = self.source()
        if source.count(self.line) != 1:
            raise RuntimeError(f"{self.module} has {source.count(self.line)} times the line {self.line!r}")
        return source.replace(self.line, self.planted)


Fault: TypeAlias = Mutant | Planted


def planted_faults() -> list[Planted]:
    """The rows of PLANTED."""
    rows = map(json.loads, PLANTED.read_text(encoding="utf-8").splitlines())
    return [Planted(ROOT / row.pop("module"), **row) for row in rows]


def _kinds_of_arguments(tree: ast.AST) -> list[tuple[int, int, int]]:
    signatures = (node for node in ast.walk(tree) if isinstance(node, ast.arguments))
    return [(len(one.posonlyargs), len(one.args), len(one.kwonlyargs)) for one in signatures]


def find_mutants(module: Path) -> list[Mutant]:
    """Every mutant of a module, but of what is left out."""
    from cosmic_ray.ast import ast_nodes, get_ast
    from cosmic_ray.plugins import get_operator, operator_names

    source = module.read_text(encoding="utf-8")
    quiet = list(_quiet_ranges(ast.parse(source)))
    tree = get_ast(source)
    found = []
    for name in operator_names():
        if any(part.lower() in name.lower() for part in _LEFT_OUT):
            continue
        operator = get_operator(name)()
        places = (start for node in ast_nodes(tree) for start, _ in operator.mutation_positions(node))
        found += [
            Mutant(module, name, occurrence, place)
            for occurrence, place in enumerate(places)
            if not any(first <= place <= last for first, last in quiet)
        ]
    return found


def _quiet_ranges(tree: ast.AST) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
    for node in ast.walk(tree):
        quiet = [getattr(node, name, None) for name in ("annotation", "returns")]
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
            quiet += [one for one in node.decorator_list if re.search("dataclass|cache|jit", ast.unparse(one))]
        if isinstance(node, ast.keyword) and node.arg == "strict":
            quiet.append(node.value)
        for one in quiet:
            if one is not None:
                yield (one.lineno, one.col_offset - 1), (one.end_lineno, one.end_col_offset)


def draw(mutants: Sequence[Mutant], sample: int, seed: int) -> list[Mutant]:
    """`sample` places, drawn without replacement, with one mutant of each; all mutants if `sample` is 0."""
    if not sample:
        return [mutant for mutant in mutants if mutant.is_one()]
    places: dict[tuple[Path, tuple[int, int]], list[Mutant]] = collections.defaultdict(list)
    for mutant in mutants:
        places[mutant.module, mutant.place].append(mutant)
    rng = random.Random(seed)
    drawn = (rng.choice(places[place]) for place in rng.sample(sorted(places), len(places)))
    return list(itertools.islice((mutant for mutant in drawn if mutant.is_one()), sample))


def tests_of(module: Path) -> list[str]:
    """The test files that mirror a module; those of its package if it has none of its own."""
    folder = ROOT / "tests" / module.relative_to(ROOT / "empax").parent
    own = [*folder.glob(f"test_{module.stem}.py"), *folder.glob(f"test_{module.stem}_*.py")]
    return sorted(str(path.relative_to(ROOT)) for path in own or folder.glob("test_*.py"))


def other_tests_of(module: Path) -> list[str]:
    """The other test files of a module's package, and all that import it; not whole runs, which take long."""
    package, name = ".".join(module.relative_to(ROOT).parent.parts), module.stem
    imports = re.compile(rf"from {package}\.{name} import|from {package} import [^\n]*\b{name}\b")
    beside = ROOT / "tests" / module.relative_to(ROOT / "empax").parent
    files = (
        path
        for path in (ROOT / "tests").rglob("test_*.py")
        if path.parent == beside
        or (path.parent.name != "end_to_end" and imports.search(path.read_text(encoding="utf-8")))
    )
    return sorted({str(path.relative_to(ROOT)) for path in files} - set(tests_of(module)))


def run_tests(tree: Path, files: Sequence[str], chosen: str, limit_seconds: float) -> str:
    """ "passed", "failed" or "timeout", in a session of its own, so that nothing outlives it."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-m", chosen, *files]
    environment = {**os.environ, "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1", "TF_CPP_MIN_LOG_LEVEL": "3"}
    with subprocess.Popen(
        command, cwd=tree, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    ) as process:
        try:
            return "passed" if process.wait(limit_seconds) in (0, 5) else "failed"
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            return "timeout"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sample", type=int, default=30, help="mutants of each group; 0 = all")
    parser.add_argument("--seed", type=int, default=0, help="of the sample")
    parser.add_argument("--only", default="", help=f"groups, comma between them, of {', '.join(TARGETS)}")
    parser.add_argument("--jobs", type=int, default=1, help="trees that are tested at a time")
    parser.add_argument("--tests", default="not slow", help="expression over pytest's markers")
    parser.add_argument("--planted", action="store_true", help="the faults of planted.jsonl; 1 if one survives")
    parser.add_argument("--kept", type=Path, help="a file of outcomes: those in it are not found again")
    parser.add_argument("--limit_seconds", type=float, default=300.0, help="a quarter of what whole tests may take")
    options = parser.parse_args()
    if unknown := set(filter(None, options.only.split(","))) - set(TARGETS):
        parser.error(f"--only: no group {', '.join(sorted(unknown))}; there are {', '.join(TARGETS)}")
    groups: dict[str, list[Fault]] = {"planted": [*planted_faults()]} if options.planted else {}
    for name in () if options.planted else options.only.split(",") if options.only else TARGETS:
        modules = sorted(path for pattern in TARGETS[name] for path in ROOT.glob(pattern))
        groups[name] = [*draw([m for module in modules for m in find_mutants(module)], options.sample, options.seed)]
    with tempfile.TemporaryDirectory(prefix="mutate-") as folder:
        outcomes = _run_all(groups, Path(folder), options)
    survived = _tell(groups, outcomes)
    return int(options.planted and survived)


def _run_all(groups: dict[str, list[Fault]], folder: Path, options: argparse.Namespace) -> dict[Fault, str]:
    trees: queue.Queue[Path] = queue.Queue()
    left_out = shutil.ignore_patterns(".git", ".venv", "runs", "results", "__pycache__", ".jax_cache")
    for job in range(options.jobs):
        trees.put(Path(shutil.copytree(ROOT, folder / str(job), ignore=left_out)))
    limits: dict[tuple[str, ...], float] = {}

    def test(mutant: Fault) -> str:
        tree, files = trees.get(), tests_of(mutant.module)
        changed = tree / mutant.module.relative_to(ROOT)
        try:
            if tuple(files) not in limits:  # whole tests first: their time is the measure, and they must pass
                begin = time.perf_counter()
                without = run_tests(tree, files, options.tests, 4 * options.limit_seconds)
                if without != "passed":
                    raise RuntimeError(f"{' '.join(files)} without a mutant: {without}")
                limits[tuple(files)] = 30 + 4 * (time.perf_counter() - begin)
            changed.write_text(mutant.apply(), encoding="utf-8")
            outcome = run_tests(tree, files, options.tests, limits[tuple(files)])
            others = other_tests_of(mutant.module) if outcome == "passed" else []
            if others and run_tests(tree, others, options.tests, 4 * options.limit_seconds) == "failed":
                outcome = "failed"  # a timeout says little here: how long they take without it was not measured
            return outcome
        finally:
            changed.write_text(mutant.source(), encoding="utf-8")
            trees.put(tree)

    kept: Path | None = options.kept
    lines = kept.read_text(encoding="utf-8").splitlines() if kept and kept.exists() else []
    before = {row["fault"]: row["outcome"] for row in map(json.loads, lines)}
    outcomes: dict[Fault, str] = {}
    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        # One of each group in turn: what is stopped early has seen all of them.
        turns = itertools.zip_longest(*groups.values())
        mutants = [mutant for turn in turns for mutant in turn if mutant is not None]
        outcomes |= {mutant: before[mutant.diff()] for mutant in mutants if mutant.diff() in before}
        left = [mutant for mutant in mutants if mutant not in outcomes]
        for mutant, outcome in zip(left, pool.map(test, left), strict=True):
            outcomes[mutant] = outcome
            if kept:
                with kept.open("a", encoding="utf-8") as file:
                    file.write(json.dumps({"fault": mutant.diff(), "outcome": outcome}) + "\n")
            mark = "SURVIVED" if outcome == "passed" else f"found ({outcome})"
            print(f"[{len(outcomes)}/{len(mutants)}] {mark}: {mutant.diff()}", flush=True)
    return outcomes


def _tell(groups: dict[str, list[Fault]], outcomes: dict[Fault, str]) -> bool:
    """Prints survivors and counts; whether anything survived that is not harmless."""
    rows = map(json.loads, HARMLESS.read_text(encoding="utf-8").splitlines())
    harmless = {(row["module"], row["line"], row["operator"]) for row in rows}

    def kind(mutant: Fault) -> str:
        if outcomes[mutant] != "passed":
            return "found"
        return "harmless" if mutant.named() in harmless else "survived"

    survivors = [mutant for mutant in outcomes if kind(mutant) == "survived"]
    print("\nsurvivors:", *(mutant.diff() for mutant in survivors), sep="\n")
    counts = {name: collections.Counter(map(kind, mutants)) for name, mutants in groups.items()}
    print(json.dumps({**counts, "total": sum(counts.values(), collections.Counter())}))
    return bool(survivors)


if __name__ == "__main__":
    sys.exit(main())
