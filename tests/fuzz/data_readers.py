"""What the fuzz tests of data files call in a process of its own: each reader to its end, on damaged bytes."""

import functools
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from empax.core.files import WorkDir, read_json, read_jsonl
from empax.core.system import RunContext
from empax.core.types import Instance
from empax.data import dailydialog, empathetic_dialogues, epitome, own, spans
from empax.data.chat import chat_template
from empax.data.dialogues import to_instances
from empax.data.store import load_instances
from empax.evaluation.rows import read_predictions
from empax.evaluation.scoring import ScoringSettings
from empax.parts.exemplars import dense_retrieval
from empax.reporting import score_file
from empax.systems.reflectdiffu import labels as intents
from tests.own_corpus import archive_of
from tests.plans import plan_of

FAST = ScoringSettings(bootstrap_samples=1)


def in_file(read: Callable[[Path], Any], raw: bytes, name: str = "file") -> Any:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, name)
        path.write_bytes(raw)
        return read(path)


def archive(raw: bytes) -> Any:
    return in_file(lambda path: to_instances(empathetic_dialogues.read_dialogues(path, "test")), raw)


def predictions(path: Path) -> Any:
    """Reads, scores and reports."""
    rows, _ = read_predictions(path)
    found = score_file.score_file(path, FAST, skip_bad_lines=True)
    score_file.text(found, variants=False)
    score_file.write(found, path.with_name("report"))
    return rows


def epitome_file(raw: bytes, good: bytes) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        for name, content in zip(epitome.FILES.values(), (raw, good, good), strict=True):
            Path(folder, name).write_bytes(content)
        return epitome.load_epitome(folder)


def given_pairs(path: Path) -> Any:
    return dense_retrieval.load_given_pairs(path.parent, "train")


SPANNED = Instance("a#2", ("My dog died.",), "Oh no.", "sad")


def work_directory(files: Mapping[str, bytes]) -> Any:
    """Instances with their notes, and every other JSON file of a run that is not in a stage's checkpoint."""
    with tempfile.TemporaryDirectory() as folder:
        for name, raw in files.items():
            path = Path(folder, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(raw)
        run = RunContext(WorkDir(Path(folder)), plan_of({"annotate": {"kind": "annotate"}}), "evaluate")
        found: list[Any] = [load_instances(run, "validation")]
        for name in sorted(set(files) - {"prepare/validation.jsonl", "annotate/validation.jsonl"}):
            found.append(list(read_jsonl(Path(folder, name))) if name.endswith("l") else read_json(Path(folder, name)))
        return found


READERS = {
    "predictions": functools.partial(in_file, predictions, name="rows.jsonl"),
    "predictions.gz": functools.partial(in_file, predictions, name="rows.jsonl.gz"),
    "own": functools.partial(in_file, lambda path: to_instances(own.read_file(path)), name="train.jsonl"),
    "empathetic_dialogues": lambda raw: archive(archive_of(raw, mode="w")),
    "archive": archive,
    "epitome": epitome_file,
    "dailydialog": functools.partial(in_file, dailydialog.load_instances, name="dialogues_test.txt"),
    "given_pairs": functools.partial(in_file, given_pairs, name=dense_retrieval.FILES["train"]),
    "intents": functools.partial(in_file, intents.read_listener_intents),
    "spans": functools.partial(in_file, lambda path: spans.read_spans(path, [SPANNED])),
    "causes": functools.partial(in_file, spans.read_cause_turns),
    "reccon": functools.partial(in_file, spans.read_reccon),
    "template": lambda raw: chat_template(raw.decode("utf-8", "replace"), bos_token="<s>", eos_token="</s>"),
    "work_directory": work_directory,
}


def read(reader: str, expected: str, *inputs: Any) -> str:
    """ "read", or "damaged" where a checksum promises `expected`, the representation of what the whole file gives."""
    found = READERS[reader](*inputs)
    return "damaged" if expected and repr(found) != expected else "read"
