"""On a GPU, with `config.deterministic`, a run that is killed ends with the bits of one that never was.

Without it no sum of a training step is in an order that changes, as far as its program says.
"""

import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import classic, emprl_transformer, reflectdiffu, reg_llm, reg_t5
from empax.core.files import read_jsonl
from empax.models.arithmetic import rows_of
from empax.pipeline.plan import make_plan, plain
from empax.planning.sketches import _bodies, sketch_stage
from empax.training.checkpoint import load_params

RECIPE = """
from configs import reg_t5

def get_config():
    config = reg_t5.get_config("no_retrieval,tiny")
    config.run = ("prepare", "generator")
    del config.longer, config.evaluate, config.report
    config.deterministic = True
    return config
"""

TIMING = {"seconds", "examples_per_second"}


ON_A_GPU = pytest.mark.skipif(
    jax.default_backend() != "gpu", reason="no GPU: tests/invariants/test_killed_run.py has a CPU's"
)


def sums(jaxpr):
    """Shapes of what is added where, of each scatter that does not add one number to each row of a batch."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "scatter-add":
            into, added = (equation.invars[i].aval.shape for i in (0, 2))
            if added != (*into[:-1], 1):
                yield into, added
        for part in _bodies(equation):
            yield from sums(part)


@pytest.mark.parametrize(
    ("make", "form", "stage"),
    [
        (reg_t5, "tiny", "joint"),
        (reg_t5, "tiny", "retriever"),
        (reg_t5, "tiny", "attributes"),
        (reg_llm, "tiny", "generator"),
        (emprl_transformer, "tiny", "ppo"),
        (classic, "moel,tiny", "generator"),
        (reflectdiffu, "tiny", "reasons"),
    ],
)
def test_no_sum_of_a_training_step_is_in_any_order(make, form, stage, monkeypatch):
    plan = make_plan(plain(make.get_config(form)))
    found = sketch_stage(plan, plan.stages[stage])

    def program():
        def loss(params, frozen, batch):
            return found.sketch.task.loss(params, frozen, batch, jax.random.key(0), train=True)[0].total

        return jax.make_jaxpr(jax.grad(loss))(found.params, found.sketch.frozen, found.sketch.batch).jaxpr

    assert list(sums(program()))  # of a CPU, whose order is always the same
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert not list(sums(program()))


@ON_A_GPU
def test_on_a_gpu_a_table_learns_the_same_bits_each_time():
    table, ids = jnp.ones((5000, 64)), jax.random.randint(jax.random.key(0), (40_000,), 0, 5000) // 7
    weights = jax.random.normal(jax.random.key(1), (40_000, 64))
    gradient = jax.jit(jax.grad(lambda table: jnp.sum(rows_of(table, ids) * weights)))
    first = np.asarray(gradient(table))
    assert all((np.asarray(gradient(table)) == first).all() for _ in range(20))


@pytest.mark.slow
@ON_A_GPU
def test_a_run_killed_on_a_gpu_ends_with_the_same_bits(recipe, tmp_path):
    config, whole, broken = (tmp_path / name for name in ("config.py", "whole", "broken"))
    config.write_text(RECIPE)
    recipe(whole, config=str(config))
    broken.mkdir()
    shutil.copytree(whole / "prepare", broken / "prepare")
    recipe(broken, "--stop=generator:3:SIGKILL", config=str(config), code=-9)
    assert not (broken / "generator" / "DONE").exists()
    assert "parameters, from step 2." in recipe(broken, config=str(config)).stderr
    params = [load_params(folder / "generator", "last") for folder in (whole, broken)]
    jax.tree.map(np.testing.assert_array_equal, *params)
    rows = [read_jsonl(folder / "metrics.jsonl") for folder in (whole, broken)]
    same = [[{name: row[name] for name in row.keys() - TIMING} for row in some] for some in rows]
    assert same[0] == same[1]
