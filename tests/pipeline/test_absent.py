"""Attributes whose corpus is not there are left out by name; who insists on them is refused."""

import logging

import pytest

from configs import reg_transformer
from empax.core.config import ConfigError
from empax.core.files import WorkDir, read_json
from empax.core.types import MECHANISMS
from empax.data.epitome import FILES, FOLDER
from empax.pipeline import prepare, run
from empax.pipeline.absent import leave_out_absent
from empax.pipeline.plan import make_plan, plain
from empax.reporting.content import facts
from tests.data.test_epitome import write
from tests.own_corpus import write_own_corpus
from tests.pipeline.test_checks import changed

pytestmark = pytest.mark.usefixtures("no_data_dir")


@pytest.fixture
def own(tmp_path):
    """The recipe of README's line, in small, on files of one's own."""
    (tmp_path / "data").mkdir()
    write_own_corpus(tmp_path / "data", every=8)
    config = plain(reg_transformer.get_config("tiny"))
    whole = plain(reg_transformer.get_config())
    assert whole["attributes"]["data"] == "if_there"
    return changed(config, {"attributes.data": "if_there", "data.name": "jsonl", "data.dir": str(tmp_path / "data")})


def decide(config, workdir):
    return leave_out_absent(make_plan(config), WorkDir(workdir)).config


def add_epitome(folder):
    (folder / FOLDER).mkdir()
    write(folder / FOLDER, ["0120", "2101", "1022"])


def test_without_epitome_the_classifiers_go_and_are_named(own, tmp_path, caplog):
    with caplog.at_level(logging.WARNING, "empax"):
        found = decide(own, tmp_path / "run")
    assert found["run"] == [name for name in own["run"] if name != "attributes"]
    assert "attributes" not in found
    assert found["annotate"] == {"kind": "annotate", "classifiers": [], "left_out": list(MECHANISMS)}
    rest = own.keys() - {"attributes", "annotate", "run"}
    assert {name: found[name] for name in rest} == {name: own[name] for name in rest}
    assert "its attributes emotional_reaction, interpretation, exploration" in caplog.text
    assert not list(run.find_problems(make_plan(found), WorkDir(tmp_path / "run")))


def test_with_epitome_nothing_is_left_out(own, tmp_path, caplog):
    add_epitome(tmp_path / "data")
    with caplog.at_level(logging.WARNING, "empax"):
        found = decide(own, tmp_path / "run")
    assert not caplog.text
    assert found["run"] == own["run"]
    assert found["annotate"] == own["annotate"]
    assert "data" not in found["attributes"]  # "epitome", as work directories of before have it


def test_who_insists_is_refused_and_so_is_half_of_epitome(own, tmp_path):
    insisting = changed(own, {"attributes.data": "epitome"})
    for config in (insisting, own):
        if config is own:
            add_epitome(tmp_path / "data")
            (tmp_path / "data" / FOLDER / FILES["exploration"]).unlink()
        with pytest.raises(ConfigError, match="holds no EPITOME"):
            run.run(config, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_plan_for_devices_elsewhere_leaves_nothing_out(own, tmp_path):
    config = changed(own, {"plan.topology": "v5e:2x4"})
    shown = leave_out_absent(make_plan(config), WorkDir(tmp_path / "run"), planned=True)
    assert list(shown.stages) == list(own["run"])


def test_a_run_laid_out_for_a_slice_has_its_data_here(own, tmp_path):
    found = decide(changed(own, {"plan.topology": "v5e:2x4"}), tmp_path / "run")
    assert "attributes" not in found["run"]
    assert not list(run.find_problems(make_plan(found), WorkDir(tmp_path / "run")))


def test_a_work_directory_goes_on_as_it_began(own, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(prepare, "run", lambda settings, run: {})
    short = changed(own, {"run": ["prepare", "attributes", "annotate"]})
    monkeypatch.setattr(run, "_run_stages", lambda *_: None)
    run.run(short, tmp_path / "without")
    add_epitome(tmp_path / "data")
    run.run(short, tmp_path / "with")
    caplog.clear()
    run.run(short, tmp_path / "without")
    assert "attributes stays left out" in caplog.text
    assert "EPITOME, their training data, is missing" not in caplog.text
    for name in FILES.values():
        (tmp_path / "data" / FOLDER / name).unlink()
    assert read_json(tmp_path / "without" / "config.json")["run"] == ["prepare", "annotate"]
    assert read_json(tmp_path / "with" / "config.json")["run"] == ["prepare", "attributes", "annotate"]
    assert "attributes" in decide(short, tmp_path / "with")  # unfinished, so that the run says what it lacks
    with pytest.raises(ConfigError, match="holds no EPITOME"):
        run.run(short, tmp_path / "with")
    (tmp_path / "with" / "config.json").unlink()
    (tmp_path / "with" / "attributes").mkdir()
    assert "attributes" in decide(short, tmp_path / "with")


def test_one_mechanism_may_be_left_out_alone(own, tmp_path):
    two = {"attributes.data": "sample", "attributes.mechanisms": list(MECHANISMS[:2])}
    named = changed(own, {**two, "annotate.left_out": [MECHANISMS[2]]})
    assert not list(run.find_problems(make_plan(named), WorkDir(tmp_path)))
    with pytest.raises(ConfigError, match="lacks a classifier of exploration"):
        run.run(changed(own, two), tmp_path / "run")
    both = changed(own, {"attributes.data": "sample", "annotate.left_out": [MECHANISMS[2]]})
    with pytest.raises(ConfigError, match=r"left_out names exploration, which a stage of config\.annotate\.classifi"):
        run.run(both, tmp_path / "run")
    with pytest.raises(ConfigError, match=r"left_out = .* not 'sentiment'"):
        make_plan(changed(own, {"annotate.left_out": ["sentiment"]}))


def test_the_report_names_what_is_left_out(own, tmp_path):
    nothing = {"config": own, "notes": {}, "verdict": {"checks": []}, "counts": {}, "data": {}, "speed": {},
               "variants": {}, "run": {}}  # fmt: skip
    assert "Attributes left out" not in facts(nothing)
    found = facts({**nothing, "config": decide(own, tmp_path / "run")})["Attributes left out"]
    assert [name for name, _ in found] == list(MECHANISMS)
