"""What every task of every system can do: it is built, planned, answers and is exported, or says that it does not."""

import dataclasses
import functools
import importlib
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import classic as classic_recipe
from configs import emprl_transformer, lempex, nec, reflectdiffu, reg_transformer
from empax import parts, systems
from empax.core.config import ConfigError
from empax.core.files import WorkDir, read_json, write_json
from empax.core.system import RunContext, load_system, module_of
from empax.core.types import Instance
from empax.pipeline import evaluate, index, knowledge, prepare, run
from empax.pipeline.plan import make_plan, plain
from empax.planning.sketches import sketch_stage
from empax.serving.export import ExportSettings, export_run
from empax.training.checkpoint import Checkpointer, CheckpointError
from tests.systems.learning import random_like

ASKED = [Instance("a#2", ("I lost my keys.",), "Oh no.", "sad"), Instance("b#2", ("We won!",), "Well done!", "joyful")]
KEY = jax.random.key(0)
SMALL = {"d_model": 16, "num_heads": 2, "d_ff": 32, "max_positions": 128}


def reg():
    config = plain(reg_transformer.get_config("tiny"))
    config["attributes"]["encoder"] = SMALL
    config["reg"]["retriever"] = SMALL
    return config


def emprl():
    """With all algorithms, and a retriever that is not there: without an index nobody looks for it."""
    config = plain(emprl_transformer.get_config("tiny"))
    more = {name: plain(emprl_transformer.get_config(f"{name},tiny"))["ppo"] for name in ("grpo", "dpo")}
    order = config["run"]
    order = [*order[: order.index("ppo") + 1], *more, *order[order.index("ppo") + 1 :]]
    config["emprl"]["retriever"] = {"pretrained": "./nowhere"}
    return config | more | {"run": order}


def lempex_config():
    config = plain(lempex.get_config("tiny"))
    config["lempex"]["retriever"] = SMALL
    config["evaluate"]["second_judge"] = ""
    config["index"]["quality"] = {}
    config["run"] = [name for name in config["run"] if name not in ("second_seed", "assess")]
    return {name: part for name, part in config.items() if name not in ("second_seed", "assess")}


def attributes():
    """Judges alone, as a system of their own."""
    own, other = emprl(), reg()
    judges = {"classifier": other["attributes"], "identifiers": own["identifiers"]}
    judges |= {"sentiment": lempex_config()["sentiment"], "reasons": plain(reflectdiffu.annotator(tiny=True))}
    parts = {name: own[name] for name in ("seed", "data", "mesh", "prepare") if name in own}
    return {**parts, "system": "attributes", "attributes": {}, "run": ["prepare", *judges], **judges}


def seq2seq():
    """The generator of REG's recipe, as a system of its own."""
    own = reg()
    parts = {name: own[name] for name in ("seed", "data", "prepare", "generator")}
    section = {"generator": own["reg"]["generator"]}
    return {**parts, "system": "seq2seq", "seq2seq": section, "run": ["prepare", "generator"]}


def with_ranker():
    """NEC with all its tasks; without facts, which take long to choose."""
    config = plain(nec.get_config("scratch,ranker,tiny"))
    config["data"]["limit"] = 128  # of fewer, no response repeats a fact, from which the ranker learns
    config["nec"] |= {"ranker": "", "entity": False, "social": False}
    config["contrastive"]["contrast"]["different"] = 0
    return config


def classic():
    """A classifier, and a generator that reads its emotions."""
    return plain(classic_recipe.get_config("emo_prepend,tiny"))


def reflect():
    config = plain(reflectdiffu.get_config("tiny"))
    for stage in ("reasons", "intents"):
        config[stage]["encoder"] = {**SMALL, "num_layers": 1}
    return config


def dense():
    """REG with the task that its other forms leave out."""
    config = plain(reg_transformer.get_config("contrastive,tiny"))
    config["attributes"]["encoder"] = config["reg"]["retriever"] = SMALL
    return config


CONFIGS = {
    "reg": reg, "dense": dense, "emprl": emprl, "lempex": lempex_config, "classic": classic, "nec": with_ranker,
    "attributes": attributes, "reflectdiffu": reflect, "seq2seq": seq2seq,
}  # fmt: skip

FOLDERS = [path.name for home in (systems, parts) for path in Path(home.__path__[0]).iterdir() if path.is_dir()]
SYSTEMS = sorted(name for name in FOLDERS if hasattr(importlib.import_module(module_of(name)), "SYSTEM"))


def config_of(system):
    """Of one of CONFIGS, or the tiny recipe that is called after the system."""
    if system in CONFIGS:
        return CONFIGS[system]()
    return plain(importlib.import_module(f"configs.{system}").get_config("tiny"))


def trained(system):
    """The training stages of a config whose tasks are the system's own."""
    plan = make_plan(config_of(system))
    return [name for name, stage in plan.stages.items() if stage.task.startswith(f"{system}.")]


STAGES = [(system, stage) for system in SYSTEMS for stage in trained(system)]
COMPILED_ALIKE = ("reg", "generator"), ("classic", "emotions")
BUILT = [pytest.param(*pair, marks=pytest.mark.slow if pair[0] not in ("reg", "classic") else ()) for pair in STAGES]


def made_up(task, batch):
    return random_like(jax.eval_shape(task.init, KEY, batch), scale=0.1)


@pytest.fixture(scope="module")
def workdirs(request, tmp_path_factory):
    """By system, a run, made where it is asked for: REG's is whole; stages of others are built and not trained."""
    kinds = {"prepare": prepare, "index": index, "knowledge": knowledge}

    @functools.cache
    def made(system):
        if system == "reg":
            finished = request.getfixturevalue("finished")  # here, since it takes long and others do without
            return WorkDir(finished), make_plan(read_json(finished / "config.json"))
        config = config_of(system)
        config["data"]["limit"] = config["data"]["limit"] or 12
        files, plan = WorkDir(tmp_path_factory.mktemp(system)), make_plan(config)
        write_json(files.config, config)
        for stage in plan.stages.values():
            context = RunContext(files, plan, stage.name)
            if stage.kind in kinds:
                kinds[stage.kind].run(stage.settings, context)
            elif stage.kind == "train":
                assembly = stage.spec.build(stage.settings, context)
                rows = assembly.train.collate(
                    np.arange(4) % len(assembly.train), stage.loop.buckets[-1], np.random.default_rng(0)
                )
                checkpointer = Checkpointer(files.stage(stage.name))
                checkpointer.save_best(1, made_up(assembly.task, jax.tree.map(jnp.asarray, rows)), 0.0)
                checkpointer.close()
        return files, plan

    return made


def test_every_task_is_here():
    for name in SYSTEMS:
        plan = make_plan(config_of(name))
        here = {stage.task for stage in plan.stages.values()} | ({"reg.dense"} if name == "reg" else set())
        assert {f"{name}.{task}" for task in load_system(name).tasks} <= here


@pytest.mark.parametrize(("system", "stage"), [*STAGES, ("contrast", "generator"), ("dense", "contrastive")])
def test_a_task_is_planned_and_a_batch_that_must_stay_whole_is_refused_in_parts(system, stage, tmp_path):
    config = config_of("reg" if system == "contrast" else system)
    config[stage]["accumulate"] = 2
    if system == "contrast":
        config[stage]["contrast"] = {"weight": 1.0}
    plan = make_plan(config)
    planned = sketch_stage(plan, plan.stages[stage])
    assert jax.tree.leaves(planned.params)
    whole = not getattr(planned.sketch.task, "splits_batches", True)
    found = [str(problem) for problem in run.find_problems(plan, WorkDir(tmp_path))]
    assert any(f"config.{stage}.accumulate = 2 splits a batch" in problem for problem in found) == whole
    if system in (*CONFIGS, "contrast"):
        assert whole == ((system, stage) in (
            ("contrast", "generator"), ("dense", "contrastive"), ("lempex", "retriever"), ("nec", "contrastive"),
            ("reflectdiffu", "generator"),
        ))  # fmt: skip


@pytest.mark.parametrize(
    ("system", "stage"),
    [pytest.param(*pair.values, marks=pytest.mark.slow) if pair.values in COMPILED_ALIKE else pair for pair in BUILT],
)
def test_a_task_answers_or_says_that_it_does_not(workdirs, system, stage):
    files, plan = workdirs(system)
    index = getattr(plan.stages[stage].settings, "index", "") or "reindex"
    context, settings = RunContext(files, plan, "evaluate"), evaluate.Settings(stage=stage, index=index)
    task, spec = plan.stages[stage].task, plan.stages[stage].spec
    if spec.answer is None:
        with pytest.raises(ConfigError, match=rf"evaluate\.stage = '{stage}' trains '{task}', which answers noth"):
            evaluate.load_answerer(settings, context, ())
        return
    found = evaluate.load_answerer(settings, context, ()).respond(ASKED, batch_size=2, seed=0)
    assert [row.id for row in found] == ["a#2", "b#2"]
    assert all(row.notes["num_tokens"] > 0 for row in found)
    with pytest.raises(CheckpointError, match="kept holds no parameters of step 3; it holds those of no step"):
        evaluate.load_answerer(dataclasses.replace(settings, step=3), context, ())
    shown = 2 if spec.reads_exemplars(plan.stages[stage].settings) else 0
    assert all(len(row.exemplars) == shown for row in found)


@pytest.mark.slow
@pytest.mark.parametrize(("system", "stage"), [pair for pair in STAGES if pair[1] not in ("ppo", "grpo", "dpo")])
def test_the_last_batch_of_an_epoch_with_its_fillers_has_a_finite_gradient(workdirs, system, stage):
    """Rows of nothing, whose norms and means are 0 / 0 to a careless loss; PPO's tasks learn from rollouts alone."""
    files, plan = workdirs(system)
    whole = plan.stages[stage]
    assembly = whole.spec.build(whole.settings, RunContext(files, plan, stage))
    rows = np.array([0, -1, -1, -1])
    batch = assembly.train.collate(rows, whole.loop.buckets[-1], np.random.default_rng(0))
    frozen, batch = jax.tree.map(jnp.asarray, (assembly.frozen, batch))
    gradient = jax.jit(jax.grad(lambda params: assembly.task.loss(params, frozen, batch, KEY, train=True)[0].total))
    for leaf in jax.tree.leaves(gradient(made_up(assembly.task, batch))):
        assert np.isfinite(leaf).all()


@pytest.mark.parametrize(("system", "stage"), BUILT)
def test_a_task_is_exported_or_says_that_it_is_not(workdirs, system, stage, tmp_path):
    files, plan = workdirs(system)
    models = plan.stages[stage].spec.models
    if not models:
        with pytest.raises(ConfigError, match=stage):
            export_run(files.root, tmp_path / "out", ExportSettings(stage=stage))
    for what in models:
        try:
            said = export_run(files.root, tmp_path / what, ExportSettings(stage=stage, what=what))
        except ConfigError as error:  # of a generator from scratch
            said = str(error)
        assert said.startswith((f"wrote the {what} of stage {stage}", f"the {what} of stage {stage!r}: this generator"))


def test_a_run_of_judges_says_what_it_trains_where_a_model_is_wanted(workdirs, tmp_path):
    files, _ = workdirs("attributes")
    with pytest.raises(ConfigError, match=r"no stage .* can be exported; it trains attributes\.classifier in 'classif"):
        export_run(files.root, tmp_path / "out", ExportSettings())


def test_a_retriever_is_missed_where_something_is_retrieved_alone(tmp_path):
    config = emprl()
    files = WorkDir(tmp_path)
    assert not list(run.find_problems(make_plan(config), files))
    config["ppo"]["rewards"] = [{"goal": "f1"}]
    (problem,) = run.find_problems(make_plan(config), files)
    assert "'./nowhere' is neither a folder" in str(problem)
