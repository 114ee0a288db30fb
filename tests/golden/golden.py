"""Are two versions of the code the same to the last bit? What tiny runs and plans gave, made and compared.

  python tests/golden/golden.py make FOLDER [RECIPE ...]     # RECIPE: "reg_transformer.py:tiny"; default: all of them
  python tests/golden/golden.py compare FOLDER OTHER_FOLDER  # exit code 1 and the places where they differ

`make` runs each recipe in a process of its own and keeps one JSON file a recipe: its plan, its metrics, its report and
its predictions. Times, versions, commits and paths are left out.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
RECIPES = (
    "reg_transformer.py:tiny",
    "reg_t5.py:tiny",
    "reg_llm.py:tiny",
    "emprl_transformer.py:tiny",
    "emprl_transformer.py:grpo,tiny",
    "emprl_llm.py:tiny",
    "empathy_identifiers.py:tiny",
    "classic.py:mime,tiny",
    "lempex.py:tiny",
    "nec.py:scratch,tiny",
    "reflectdiffu.py:tiny",
)
LEFT_OUT = ("speed", "run", "peak_memory_mb", "versions")
"""Keys whose values say when and where, not what; so do all whose names begin or end with a word of TIMES."""
TIMES = ("seconds", "_per_second")


def make(folder: Path, recipes: tuple[str, ...]) -> None:
    """Runs `recipes` and writes what they gave into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    for recipe in recipes:
        with tempfile.TemporaryDirectory() as scratch:
            found = {"plan": run(recipe, Path(scratch), "--mode=plan")} | results(recipe, Path(scratch) / "run")
        (folder / f"{recipe.replace('.py:', '-')}.json").write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")
        print(f"{recipe}: made", flush=True)


def results(recipe: str, workdir: Path) -> dict[str, Any]:
    """What a whole run of `recipe` in `workdir` gave."""
    run(recipe, workdir)
    lines = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    found: dict[str, Any] = {"metrics": without_times(lines)}
    for name in ("predictions.jsonl", "report.json"):
        if (workdir / name).exists():
            text = (workdir / name).read_text()
            digest = hashlib.sha256(text.encode()).hexdigest()
            found[name] = without_times(json.loads(text)) if name == "report.json" else digest
    return found


def run(recipe: str, workdir: Path, *flags: str) -> str:
    """The standard output of one command in a process of its own, on one device."""
    command = [sys.executable, "-m", "empax.main", f"--config=configs/{recipe}", f"--workdir={workdir}", *flags]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr[-2000:]}")
    return done.stdout


def without_times(value: Any) -> Any:
    """The same without LEFT_OUT, at any depth."""
    if isinstance(value, dict):
        timed = {key for key in value if key.startswith(TIMES) or key.endswith(TIMES)}
        return {key: without_times(item) for key, item in value.items() if key not in {*LEFT_OUT, *timed}}
    return [without_times(item) for item in value] if isinstance(value, list) else value


def differences(ours: Any, theirs: Any, where: str) -> Iterator[str]:
    """Paths at which two JSON values differ, with both."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        for key in sorted({*ours, *theirs}):
            yield from differences(ours.get(key), theirs.get(key), f"{where}.{key}")
    elif isinstance(ours, list) and isinstance(theirs, list) and len(ours) == len(theirs):
        for i, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
            yield from differences(mine, other, f"{where}[{i}]")
    elif ours != theirs:
        yield f"{where}: {str(ours)[:100]} / {str(theirs)[:100]}"


def compare(folder: Path, other: Path) -> int:
    """Prints the differences of what both folders have, which `make` wrote; their number."""
    made = [{path.name for path in one.glob("*.json")} for one in (folder, other)]
    if alone := sorted(made[0] ^ made[1]):
        print(f"not in both folders, and not compared: {', '.join(alone)}")
    count = 0
    for name in sorted(made[0] & made[1]):
        ours, theirs = (without_times(json.loads((one / name).read_text())) for one in (folder, other))
        found = list(differences(ours, theirs, name.removesuffix(".json")))
        print(f"{name}: {len(found)} differences")
        print("\n".join(f"  {line}" for line in found[:20]), end="\n" if found else "")
        count += len(found)
    return count


if __name__ == "__main__":
    if len(sys.argv) >= 3 and sys.argv[1] == "make":
        make(Path(sys.argv[2]), tuple(sys.argv[3:]) or RECIPES)
    elif len(sys.argv) == 4 and sys.argv[1] == "compare":
        sys.exit(1 if compare(Path(sys.argv[2]), Path(sys.argv[3])) else 0)
    else:
        sys.exit(__doc__)
