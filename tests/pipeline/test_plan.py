"""One flat section of a recipe, dealt out to the loop and to the task that it names."""

import pytest

from configs import reg_transformer
from empax.core.config import ConfigError
from empax.core.system import find_task, load_system
from empax.parts import attributes
from empax.parts.attributes import ClassifierTaskSettings
from empax.pipeline.plan import make_plan, plain
from empax.systems import nec, reg
from empax.systems.reg.settings import JointTaskSettings

SECTION = {"task": "joint", "steps": 3, "batch_size": 2, "buckets": [8], "retriever_weight": 0.4}


def make_stage(name, section, system):
    shared = {"system": system, "seed": 0, "data": {"name": "sample"}, "run": [name], system: {}}
    return make_plan({**shared, name: {"kind": "train", **section}}).stages[name]


def test_settings_go_where_they_belong():
    made = make_stage("joint", SECTION, "reg")
    assert (made.name, made.kind, made.task, made.seed) == ("joint", "train", "reg.joint", None)
    assert (made.loop.steps, made.loop.buckets) == (3, (8,))
    assert made.settings == JointTaskSettings(retriever_weight=0.4)
    assert made.spec is reg.TASKS["joint"]


def test_a_stage_may_name_a_task_of_another_system():
    section = {k: v for k, v in SECTION.items() if k != "retriever_weight"}
    made = make_stage("judges", {**section, "task": "attributes.classifier", "holdout": 0.3, "seed": 4}, "reg")
    assert made.settings == ClassifierTaskSettings(holdout=0.3)
    assert (made.task, made.seed) == ("attributes.classifier", 4)
    assert made.spec is attributes.TASKS["classifier"]
    assert not made.alone
    assert set(made.reads) == {"data", "judges", "task", "system"}
    alone = make_stage(
        "judges", {**section, "task": "attributes.classifier", "encoder": {"pretrained": "minilm"}}, "reg"
    )
    assert alone.alone
    assert set(alone.reads) == {"data", "judges", "seed"}
    assert find_task("attributes.classifier", "reg", "c") == (attributes.SYSTEM, "classifier")


@pytest.mark.parametrize(("section", "changes"), [("decoding", {"method": "greedy"}), ("neighbours", {"knn": 7})])
def test_how_a_system_answers_changes_no_stage_that_trains_or_searches(section, changes):
    config = plain(reg_transformer.get_config("tiny"))
    plans = [make_plan(config), make_plan({**config, "reg": {**config["reg"], section: changes}})]
    before, after = ({name: one.reads for name, one in plan.stages.items()} for plan in plans)
    stages = ("generator", "index", "exemplars", "emotions", "retriever", "reindex", "joint", "evaluate")
    assert [name for name in stages if before[name] != after[name]] == ["evaluate"]


def test_a_system_is_a_module_that_has_one(monkeypatch):
    with pytest.raises(ConfigError, match="'generator' names no System"):
        load_system("generator")
    monkeypatch.setattr(reg, "SYSTEM", nec.SYSTEM)
    with pytest.raises(ConfigError, match=r"reg\.SYSTEM has the name 'nec'; give it its module's"):
        load_system("reg")
    monkeypatch.undo()
    assert load_system("reg") is reg.SYSTEM
