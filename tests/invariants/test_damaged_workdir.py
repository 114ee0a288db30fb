"""Every file of a finished run damaged in turn: whoever reads it says so by name, or the result is the same."""

import dataclasses
import shutil
from collections import Counter
from itertools import cycle

import pytest

from empax.core.config import ConfigError
from empax.core.files import DataError, hash_file, hash_json
from empax.core.tree import hash_tree
from empax.serving.export import ExportSettings, export_run
from empax.serving.session import Session
from empax.training.checkpoint import CheckpointError
from tests.damage import HOW, damage

pytestmark = pytest.mark.slow

ERRORS = (ConfigError, DataError, CheckpointError)
KEPT = ("config.json", "run.json", "CHECKSUMS", "metrics.jsonl")


@pytest.fixture
def workdir(finished, tmp_path):
    shutil.copytree(finished, tmp_path / "run")
    return tmp_path / "run"


def cases(workdir, names, hows):
    """Damages one file after the other, gives (path, name, how), and mends everything afterwards."""
    shared = {workdir / name: (workdir / name).read_bytes() for name in KEPT}
    for name, how in zip(names, hows, strict=True):
        path = workdir / name
        data = path.read_bytes()
        if not data and how != "deleted":
            continue
        damage(path, how)
        yield path, name, how
        path.write_bytes(data)
        for other, content in shared.items():
            if not other.exists() or other.read_bytes() != content:
                other.write_bytes(content)


def files_of(workdir):
    return sorted(path.relative_to(workdir).as_posix() for path in workdir.rglob("*") if path.is_file())


def is_by_product(name):
    return "/checkpoints/" in name or name.startswith("tensorboard/")


def fingerprint(session):
    answerer = session.answerer
    search = answerer._make_examples
    return hash_json([
        hash_tree(answerer._params), search.encoder.hash, hash_tree({"rows": search.index.embeddings}),
        [dataclasses.asdict(i) for i in search.corpus.instances], dataclasses.asdict(search.parts.settings),
        answerer.tokenizer.backend.to_str(), [judge.hash for judge in session.judges],
        session.head, session.seed,
    ])  # fmt: skip


def exported(workdir, output):
    export_run(workdir, output, ExportSettings(what="retriever"))
    return {path.relative_to(output).as_posix(): hash_file(path) for path in output.rglob("*") if path.is_file()}


def sampled(names, each=1):
    """Of every folder the first files that are no by-products."""
    taken = Counter()
    for name in names:
        folder = name.rpartition("/")[0]
        if not is_by_product(name) and (taken[folder] < each or name.count("/") < 2):
            taken[folder] += 1
            yield name


@pytest.mark.parametrize("reader", ["session", "export"])
def test_no_damage_is_silent_to_who_reads_a_run(workdir, tmp_path, reader):
    number = cycle(range(10**6))
    readers = {
        "session": lambda: fingerprint(Session.load(workdir)),
        "export": lambda: exported(workdir, tmp_path / f"export-{next(number)}"),
    }
    read = readers[reader]
    whole, counts, names = read(), Counter(), list(sampled(files_of(workdir)))
    hows = [how for how, _ in zip(cycle(HOW), names, strict=False)]
    for _, name, how in cases(workdir, names, hows):
        try:
            kind = "the same result" if read() == whole else f"silent: {name} {how}"
        except ERRORS as error:
            stage = workdir / name.split("/")[0]  # of a whole folder that is of no use, the folder is named
            named = str(stage) in str(error) or f"its {stage.name} stage" in str(error)
            kind = "an error" if named else f"unnamed: {name} {how}: {error}"
        counts[kind] += 1
    print(f"\n{reader}: {dict(counts)}, {counts.total()} in all")
    assert set(counts) <= {"the same result", "an error"}, counts
