r"""Tunes the weight of a corpus in a model's predictions: negative log-likelihood of validation replies, by weight.

  python -m tools.neighbours RUN copy      # of the words of the retrieved exemplars; RUN reads exemplars
  python -m tools.neighbours RUN knn       # of the tokens after the nearest states of 10,000 training rows

RUN is the work directory of a finished run of REG. One pass over --rows of the validation split scores every
weight at every temperature; `reg.neighbours` of configs/reg_transformer.py has the best values.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from empax.core.command import in_one_line
from empax.core.config import ConfigError
from empax.core.files import WorkDir, write_json
from empax.core.paths import expand
from empax.core.system import RunContext
from empax.data.batches import draw, eval_batches
from empax.data.store import load_instances
from empax.decoding.neighbours import copy_probabilities, knn_probabilities
from empax.parts.generator.mixing import response_states
from empax.parts.generator.settings import NeighbourSettings
from empax.parts.generator.task import shown_responses
from empax.pipeline import evaluate
from empax.pipeline.plan import read_plan

WEIGHTS = (0.0, 0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4)
TEMPERATURES = (0.01, 0.03, 0.1, 0.3, 1.0)


@in_one_line
def main(workdir: Path, kind: str, rows: int, file: Path | None) -> None:
    """Prints the table, and writes it as JSON if a file is given."""
    files = WorkDir(expand(workdir))
    plan, own = read_plan(files), NeighbourSettings(**{f"{kind}_weight": 0.5})  # makes the states available
    shared: Any = dataclasses.replace(plan.system_settings, neighbours=own)  # pyright: ignore[reportArgumentType]
    plan = dataclasses.replace(plan, system_settings=shared)
    run = RunContext(files, plan, evaluate.main_stage(plan))
    settings = run.settings(run.stage, evaluate.Settings)
    answerer: Any = evaluate.load_answerer(settings, run, settings.buckets)
    if kind == "copy" and answerer.exemplars is None:
        raise ConfigError(f"{workdir} reads no exemplars to copy from; take knn, or a run that reads some.")
    task, asked = answerer.task, draw(load_instances(run, "validation"), rows)
    params, examples = answerer._params, answerer._make_examples(asked).examples

    def of_corpus(params: Any, batch: Any, read: Any) -> Callable[..., jax.Array]:
        if kind == "knn":
            return lambda states, **given: knn_probabilities(states, params["neighbours"], num=own.knn, **given)
        shown = shown_responses(batch)
        assert shown is not None
        said = response_states(*shown, task.decoder.eos_id, lambda ids: task._hidden(params, ids, read, None))
        return lambda states, **given: copy_probabilities(states, said, **given)

    @jax.jit
    def probabilities(params: Any, batch: Any) -> tuple[jax.Array, list[jax.Array]]:
        """Returns each reply token's probability by the model, and by the corpus for each temperature (NaN = none)."""
        read = task.encode(params, batch, None)
        hidden, logits = task._hidden(params, batch.target, read, None), task.logits(params, batch, read, None)
        say, size = of_corpus(params, batch, read), logits.shape[-1]
        found = [say(hidden, temperature=temperature, vocab_size=size) for temperature in TEMPERATURES]

        def of_target(probs: jax.Array) -> jax.Array:
            return jnp.take_along_axis(probs, batch.target[..., None], axis=-1)[..., 0]

        said = [jnp.where(probs.sum(axis=-1) > 0, of_target(probs), jnp.nan) for probs in found]
        return of_target(jax.nn.softmax(logits.astype(jnp.float32), axis=-1)), said

    alone, beside = [], []
    for indices, batch in eval_batches(examples, batch_size=settings.batch_size, buckets=settings.buckets):
        real = np.asarray(batch.target_mask) & (indices >= 0)[:, None]
        model, corpus = jax.device_get(probabilities(params, batch))
        alone.append(np.asarray(model, np.float64)[real])
        beside.append(np.stack([np.asarray(one, np.float64)[real] for one in corpus]))
    model, corpus = np.concatenate(alone), np.concatenate(beside, axis=1)
    table = {}
    for temperature, said in zip(TEMPERATURES, corpus, strict=True):
        said = np.where(np.isnan(said), model, said)  # without one, the model has all the weight
        table[temperature] = {w: float(-np.log((1 - w) * model + w * said).mean()) for w in WEIGHTS}
    best = min(((nll, t, w) for t, row in table.items() for w, nll in row.items()), key=lambda one: one[0])
    print(f"{kind}: nats a token of {len(model):,} in {len(asked):,} validation replies")
    print("temperature" + "".join(f"{w:>9g}" for w in WEIGHTS))
    for temperature, row in table.items():
        print(f"{temperature:>11g}" + "".join(f"{nll:9.4f}" for nll in row.values()))
    print(
        f"best: weight {best[2]:g} at temperature {best[1]:g}, {best[0]:.4f}; alone {table[TEMPERATURES[0]][0.0]:.4f}"
    )
    if file is not None:
        write_json(expand(file), {"kind": kind, "rows": len(asked), "tokens": len(model), "nats_a_token": table})


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("kind", choices=("copy", "knn"))
    parser.add_argument("--rows", type=int, default=1000, help="number of validation rows, drawn at random (1000)")
    parser.add_argument("--file", type=Path, help="file to write the table to as well")
    options = parser.parse_args()
    sys.exit(main(options.run, options.kind, options.rows, options.file))
