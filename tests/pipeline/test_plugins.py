"""A system of somebody's own, by "module:name"."""

import pytest

import empax
from empax.core.config import ConfigError
from empax.core.files import WorkDir, read_json, read_jsonl
from empax.core.manifest import read_done
from empax.core.system import load_system
from empax.pipeline import run
from empax.pipeline.plan import make_plan

SYSTEM = '''
import dataclasses

import jax
import jax.numpy as jnp

from empax.core.system import Assembly, Sketch
from empax.core.shapes import shapes_of
from empax.core.system import System, TaskSpec
from empax.core.types import Batch, Mean
from empax.data.batches import SequenceExamples
from empax.data.store import check_prepared, load_instances, run_tokenizer


@dataclasses.dataclass(frozen=True)
class Shared:
    width: int = 4


@dataclasses.dataclass(frozen=True)
class Settings:
    scale: float = 1.0


@dataclasses.dataclass(frozen=True)
class Length:
    """Says from the ids of a context how long its answer is."""

    words: int
    width: int
    scale: float

    def init(self, rng, batch):
        return {"embedding": jax.random.normal(rng, (self.words, self.width)), "out": jnp.zeros((self.width,))}

    def loss(self, params, frozen, batch, rng, *, train):
        seen = jnp.where(batch.source_mask[..., None], params["embedding"][batch.source], 0.0).sum(axis=1)
        error = (jnp.einsum("BD,D->B", seen, params["out"]) - self.scale * batch.target[:, 0]) ** 2
        return Mean.of(error, batch.valid), {}


def task(settings, run, words):
    return Length(words, run.shared_settings(Shared).width, settings.scale)


def build(settings, run):
    tokenizer = run_tokenizer(run)

    def examples(split):
        found = load_instances(run, split)
        texts = tokenizer.encode_batch([i.context[-1] for i in found])
        lengths = [[min(len(i.response.split()), 9)] for i in found]
        return SequenceExamples(texts, lengths, pad_id=tokenizer.pad_id, max_target_tokens=1)

    return Assembly(task(settings, run, tokenizer.vocab_size), examples("train"), examples("validation"))


def sketch(settings, run, rows, length):
    words = run_tokenizer(run, planned=True).vocab_size
    return Sketch(task(settings, run, words), shapes_of(Batch, B=rows, S=length, T=1))


SYSTEM = System("toy", Shared, {"length": TaskSpec(Settings, lambda _, run: check_prepared(run), build, sketch)})
'''
CONFIG = {
    "seed": 0,
    "data": {"name": "sample", "limit": 40},
    "mesh": {"data": 1},
    "run": ["prepare", "lengths"],
    "toy": {"width": 3},
    "prepare": {"kind": "prepare", "tokenizer": {"vocab_size": 400}},
    "lengths": {"kind": "train", "task": "length", "steps": 3, "batch_size": 8, "buckets": [64], "scale": 2.0},
}


@pytest.fixture
def name(tmp_path, monkeypatch, request):
    module = f"toy_system_{abs(hash(request.node.name))}"
    (tmp_path / f"{module}.py").write_text(SYSTEM)
    monkeypatch.syspath_prepend(str(tmp_path))
    return f"{module}:SYSTEM"


@pytest.mark.slow
def test_a_recipe_trains_a_system_of_its_own(name, tmp_path):
    files = WorkDir(tmp_path / "run")
    config = CONFIG | {"system": name}
    run.run(config, files.root)
    losses = [row["loss"] for row in read_jsonl(files.metrics) if row["stage"] == "lengths"]
    assert losses
    module = name.partition(":")[0]
    assert module in read_done(files.stage("lengths"))["code"]
    before = read_done(files.stage("lengths"))
    run.run(config, files.root)  # goes on: nothing is left to do
    assert read_done(files.stage("lengths")) == before
    assert read_json(files.config) == config


def test_its_mistakes_are_named_like_any_others(name):
    with pytest.raises(ConfigError, match=r"config\.toy\.widht is not a setting of Shared; did you mean 'width'"):
        make_plan(CONFIG | {"system": name, "toy": {"widht": 3}})
    with pytest.raises(ConfigError, match=r"config\.lengths\.task = 'size' is unknown; \w+:SYSTEM has length"):
        make_plan(CONFIG | {"system": name, "lengths": {**CONFIG["lengths"], "task": "size"}})
    other = {**CONFIG["lengths"], "task": f"{name}.length"}
    of_reg = {key: value for key, value in CONFIG.items() if key != "toy"} | {"system": "reg", "reg": {}}
    plan = make_plan(of_reg | {"lengths": other})
    assert plan.stages["lengths"].task == "toy.length"
    with pytest.raises(ConfigError, match="names no System"):
        load_system(name.replace("SYSTEM", "Length"))
    with pytest.raises(ConfigError, match=r"config\.system = 'no_such:SYSTEM': there is no module 'no_such'"):
        load_system("no_such:SYSTEM")


OWN = """
import jax
import jax.numpy as jnp


def unsure(logits, batch):
    log_probs = jax.nn.log_softmax(logits)
    return -(jnp.exp(log_probs) * log_probs).sum(axis=-1)


def questions(contexts, responses, references):
    return ["?" in response for response in responses]
"""


@pytest.mark.slow
def test_a_recipe_takes_losses_and_metrics_of_its_own(tmp_path, monkeypatch):
    module = "own_functions_of_somebody"
    (tmp_path / f"{module}.py").write_text(OWN)
    monkeypatch.syspath_prepend(str(tmp_path))
    losses = ({"function": f"{module}:unsure", "weight": -0.1},)
    settings = {"generator.losses": losses, "joint.losses": losses, "report.metrics": (f"{module}:questions",)}
    files = WorkDir(empax.run("quickstart:tiny", tmp_path / "run", settings=settings))
    logged = {row["stage"] for row in read_jsonl(files.metrics) if any(key.endswith(":unsure") for key in row)}
    assert logged == {"generator", "joint"}
    assert 0 <= read_json(files.root / "report.json")["metrics"][f"{module}:questions"]["value"] <= 1
    code = {name: module in read_done(files.stage(name))["code"] for name in ("index", "generator", "joint", "report")}
    assert code == {"index": False, "generator": True, "joint": True, "report": True}


@pytest.mark.parametrize("name", ["", ".", "..", "rag", "rag.tasks", "reg.no_such", "reg.tasks.deep"])
def test_a_system_that_there_is_not_is_named(name):
    with pytest.raises(ConfigError, match=r"config\.system = .* is not a module of empax/systems"):
        load_system(name)
