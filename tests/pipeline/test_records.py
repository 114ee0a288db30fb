"""What a work directory records of its stages, and that every damage is found by the file's name."""

import shutil

import pytest

from empax.core.files import DataError, WorkDir, read_json, read_jsonl, write_json, write_jsonl, write_text
from empax.core.manifest import read_done, read_sealed, verify, write_sealed
from empax.core.system import RunContext
from empax.core.types import Instance
from empax.data.dialogues import instance_to_row
from empax.data.store import load_candidates, load_instances, run_tokenizer
from empax.pipeline import code
from empax.pipeline.records import Records, check_origins
from empax.pipeline.workdirs import claim
from tests.damage import HOW, damage
from tests.plans import plan_of, run_by_files

CONFIG = {
    "system": "reg",
    "seed": 0,
    "data": {"name": "sample", "dir": "here"},
    "run": ["prepare", "generator", "index", "evaluate"],
    "reg": {"passages": 2},
    "prepare": {"kind": "prepare"},
    "generator": {"kind": "train", "task": "generator", "steps": 4, "batch_size": 2, "buckets": [8]},
    "index": {"kind": "index"},
    "evaluate": {"kind": "evaluate", "stage": "generator"},
}
INSTANCES = [Instance(f"d{i}#2", (f"turn {i}",), "yes", "sad", {}) for i in range(3)]


def make(files, name):
    if name == "prepare":
        write_jsonl(files.instances("train"), map(instance_to_row, INSTANCES))
        write_json(files.tokenizer / "tokenizer.json", {"tokens": ["a"]})
    if name == "generator":
        write_text(files.stage(name) / "best" / "4" / "data", "parameters")
        write_text(files.stage(name) / "checkpoints" / "4" / "data", "state")
        write_text(files.tensorboard(name) / "events", "events")
        write_jsonl(files.metrics, [{"stage": name, "step": step, "loss": 0.1} for step in (2, 4)])
    if name == "index":
        write_text(files.index(name) / "embeddings.npy", "numbers")
    if name == "evaluate":
        write_jsonl(files.predictions, [{"response": "yes"}])
        write_json(files.stage(name) / "evaluate.json", {"seconds": 1.0})


def records_of(files, config=CONFIG):
    return Records(files, run_by_files(config))


def run(root, config=CONFIG):
    files = WorkDir(root)
    claim(files, run_by_files(config))
    records = records_of(files, config)
    records.check(first=True)
    for name in config["run"]:
        if not files.done(name).exists():
            records.check()
            records.begin(name)
            make(files, name)
            records.finish(name, {"seconds": 1.0})
    return files


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return run(tmp_path_factory.mktemp("records") / "whole").root


@pytest.fixture
def files(whole, tmp_path):
    shutil.copytree(whole, tmp_path / "run")
    return WorkDir(tmp_path / "run")


def test_done_describes_every_file_that_the_stage_made(files):
    described = {name: set(read_done(files.stage(name))["files"]) for name in CONFIG["run"]}
    assert described["prepare"] == {"prepare/BEGUN", "prepare/train.jsonl", "prepare/tokenizer/tokenizer.json"}
    assert described["generator"] == {
        "generator/BEGUN", "generator/best/4/data", "generator/checkpoints/4/data", "generator/metrics.jsonl",
        "tensorboard/generator/events",
    }  # fmt: skip
    assert described["evaluate"] == {"evaluate/BEGUN", "evaluate/evaluate.json", "predictions.jsonl"}
    assert set(read_done(files.stage("evaluate"))["built_on"]) == {"prepare", "generator", "index"}


def refused(root):
    try:
        run(root)
    except DataError as error:
        return str(error)
    return ""


def test_a_log_that_lies_there_belongs_to_no_stage(tmp_path, monkeypatch):
    log, own = tmp_path / "train.log", make

    def logging(files, name):
        with log.open("a") as file:
            file.write(f"{name}\n")
        own(files, name)

    monkeypatch.setitem(globals(), "make", logging)
    files = run(tmp_path)
    log.write_text("mended")
    assert refused(tmp_path) == ""
    claim(files, run_by_files(CONFIG), redo=["prepare"])
    assert log.read_text() == "mended"
    assert not files.predictions.exists()


HARMLESS = ("CHECKSUMS", "config.json", "run.json", "metrics.jsonl")
"""Written anew from what else is there."""


@pytest.mark.parametrize("how", HOW)
def test_no_damage_of_any_file_is_silent(whole, tmp_path, how, caplog):
    """Each file in turn: named in an error or a warning, or written anew with the same bytes."""
    names = [path.relative_to(whole) for path in sorted(whole.rglob("*")) if path.is_file()]
    assert len(names) > 15
    for number, name in enumerate(names):
        root = tmp_path / str(number)
        shutil.copytree(whole, root)
        damage(root / name, how)
        caplog.clear()
        error = refused(root)
        if error:
            assert str(root / name) in error, name
            assert "--redo=" in error, name
        elif name.name == "DONE":
            assert how == "deleted"
            assert read_json(root / name) == read_json(whole / name)
        elif str(name) in HARMLESS:
            assert str(root / name) in caplog.text or "CHECKSUMS" in str(name), name
            assert (root / name).read_bytes() == (whole / name).read_bytes() or name.name == "run.json", name
        else:
            assert str(root / name) in caplog.text, name
            assert set(name.parts) & {"BEGUN", "checkpoints", "tensorboard"}, name


@pytest.mark.parametrize("how", HOW)
def test_whoever_reads_finds_the_damage(files, how):
    context = RunContext(files, plan_of(CONFIG), "evaluate")
    write_text(files.stage("index") / "candidates_train.npz", "another origin")
    with pytest.raises(DataError, match=r"candidates_train\.npz is not listed in .*--redo=index"):
        load_candidates(context, "index", "train")
    damage(files.instances("train"), how)
    with pytest.raises(DataError, match=r"prepare/train\.jsonl .*--redo=prepare"):
        load_instances(context, "train")
    damage(files.tokenizer / "tokenizer.json", how)
    with pytest.raises(DataError, match=r"tokenizer\.json .*--redo=prepare"):
        run_tokenizer(context)
    damage(files.predictions, how)
    with pytest.raises(DataError, match=r"predictions\.jsonl .*--redo=evaluate"):
        verify(files.predictions, stage=files.stage("evaluate"))


def test_lost_annotations_are_no_run_without_attributes(tmp_path):
    shared = {name: value for name, value in CONFIG.items() if name not in CONFIG["run"]}
    config = shared | {"run": ["prepare", "annotate"], "prepare": CONFIG["prepare"], "annotate": {"kind": "annotate"}}
    files = WorkDir(tmp_path)
    records = records_of(files, config)
    for name in config["run"]:
        records.begin(name)
        make(files, name)
        if name == "annotate":
            write_jsonl(files.notes("annotate", "train"), [{"id": i.id, "context_attributes": {}} for i in INSTANCES])
        records.finish(name, {})
    assert len(load_instances(RunContext(files, plan_of(config), "x"), "train")) == 3
    files.notes("annotate", "train").unlink()
    with pytest.raises(DataError, match=r"annotate/train\.jsonl is gone.*--redo=annotate"):
        load_instances(RunContext(files, plan_of(config), "x"), "train")


def test_a_stage_made_again_alike_keeps_what_follows_and_made_otherwise_does_not(files):
    shutil.rmtree(files.stage("prepare"))
    before = files.done("evaluate").read_bytes()
    run(files.root)
    assert files.done("evaluate").read_bytes() == before
    files.done("prepare").unlink()
    records = records_of(files)
    records.begin("prepare")
    write_jsonl(files.instances("train"), map(instance_to_row, INSTANCES[:2]))
    records.finish("prepare", {})
    with pytest.raises(DataError, match=r"generator was made from a different prepare .*--redo=generator"):
        check_origins(files, run_by_files(CONFIG).stages.values())


def test_stages_of_other_settings_do_not_pass(files):
    with pytest.raises(DataError, match=r"prepare was made with settings other than config\.prepare.*--redo=prepare"):
        check_origins(files, run_by_files(CONFIG | {"data": {"name": "jsonl", "dir": "here"}}).stages.values())
    check_origins(files, run_by_files(CONFIG | {"data": {"name": "sample", "dir": "elsewhere"}}).stages.values())
    with pytest.raises(DataError, match=r"generator was made with settings other .*--redo=generator"):
        check_origins(files, run_by_files(CONFIG | {"seed": 1}).stages.values())


def with_other_code(path):
    record = read_sealed(path)
    record["code"]["empax.core.files"] = "of yesterday"
    write_sealed(path, record)


def test_changed_code_is_told_with_the_stages(files, caplog):
    with_other_code(files.done("generator"))
    records_of(files).check(first=True)
    assert "THE CODE HAS CHANGED since these stages were made: generator (empax.core.files)" in caplog.text
    assert "--redo=generator makes them anew. What EMPAX_CACHE_DIR keeps" in caplog.text


@pytest.mark.parametrize(("source", "told"), [("of yesterday", True), (None, False)])
def test_what_another_system_alone_imports_has_not_changed(files, caplog, source, told):
    done = read_sealed(files.done("generator"))
    shared = {name: found for name, found in done["code"].items() if not name.startswith("empax.systems.reg")}
    done["code"] = shared | {"empax.systems.emprl": "its own"} | ({"empax.core.files": source} if source else {})
    write_sealed(files.done("generator"), done)
    records_of(files).check(first=True)
    assert ("generator (empax.core.files)" in caplog.text) == told
    assert ("THE CODE HAS CHANGED" in caplog.text) == told


def test_code_that_changes_while_a_stage_runs_is_never_the_code_of_its_result(files, caplog):
    files.done("index").unlink()
    with_other_code(files.begun("index"))
    run(files.root)
    assert "index: the code has changed since it began (empax.core.files)" in caplog.text
    caplog.clear()
    records_of(files).check(first=True)
    assert "THE CODE HAS CHANGED since these stages were made: index" in caplog.text


def test_code_is_all_that_is_imported_and_nothing_else():
    found = code.code_of(["empax.pipeline.train", "empax.systems.emprl"])
    assert {"empax.training.loop", "empax.systems.emprl.tasks", "empax.systems.emprl.ppo", "empax.core.files"} <= set(
        found
    )
    assert not {"empax.systems.reg", "empax.reporting.report", "empax.serving.session"} & set(found)
    assert "empax.core.distributed" in found  # `from empax.core import distributed`
    assert code.changed(found, found | {"empax.core.files": "x"}) == ["empax.core.files"]


def test_a_changed_byte_of_source_is_another_hash(tmp_path, monkeypatch):
    package = tmp_path / "empax"
    package.mkdir()
    (package / "a.py").write_text("from empax.b import (\n    c,\n)\n")
    (package / "b.py").write_text("c = 1\n")
    monkeypatch.setattr(code, "_PACKAGE", package)
    code._source.cache_clear()
    before = code.code_of(["empax.a"])
    assert list(before) == ["empax.a", "empax.b"]
    (package / "b.py").write_text("c = 2\n")
    code._source.cache_clear()
    assert code.changed(before, code.code_of(["empax.a"])) == ["empax.b"]
    code._source.cache_clear()


def test_rows_of_unfinished_stages_stay_when_metrics_are_written_anew(files, caplog):
    files.done("index").unlink()
    rows = list(read_jsonl(files.metrics))
    write_jsonl(files.metrics, [rows[0] | {"loss": 0.2}, {"stage": "index", "step": 1}])
    records_of(files).check()
    assert str(files.metrics) in caplog.text
    assert list(read_jsonl(files.metrics)) == [*rows, {"stage": "index", "step": 1}]
