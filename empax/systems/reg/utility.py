"""What distillation changes: the utility for G1 of the retriever's first choice, on held-out contexts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from empax.core.sharding import MeshSettings, batch_sharding, local_mesh, place_rows, rows_split_as
from empax.core.types import Params
from empax.data.batches import eval_batches
from empax.data.exemplars import ExemplarExamples, dialogue_groups
from empax.evaluation.retrieval import with_intervals
from empax.evaluation.statistics import DifferenceStatistic, Statistic, mean_statistic
from empax.parts.generator.parts import places
from empax.systems.reg.tasks import RetrieverTask, first_choice
from empax.training.settings import LoopSettings


def measure_utility(
    task: RetrieverTask,
    generator: Params,
    retrievers: Mapping[str, Params],
    examples: ExemplarExamples,
    loop: LoopSettings,
    mesh: MeshSettings,
) -> dict[str, Any]:
    """Tries the candidates of every context with G1, and compares the first choices of two retrievers.

    `retrievers` are the parameters "before" and "after" distillation; `examples` have K candidates each. `loop` has the
    sizes of their batches.

    Returns:
      `contexts`, how many have candidates; `utility`, the mean over candidates; `utility_gain`, by how much the
      retriever's first choice is more useful than the mean; `utility_gain_before`, the same before distillation;
      `utility_gain_minus_before`, which is paired; and `utility_gain_at_most`, the gain of the most useful candidate.
      All but the first have 95% intervals over dialogues.
    """
    devices = local_mesh(mesh)
    rows_of = batch_sharding(devices) if devices else None
    generator, *both = (
        jax.device_put(params, places(params, devices, mesh) if devices else None)
        for params in (generator, retrievers["before"], retrievers["after"])
    )

    @jax.jit
    def measured(generator: Params, both: list[Params], batch: Any) -> list[Any]:
        with rows_split_as(rows_of):
            batch = batch.replace(utilities=task.utilities(generator, batch, jax.random.key(0)))
            return [*(task.gains(params, batch) for params in both), first_choice(batch.utilities, batch)]

    found = np.zeros((4, len(examples)))
    known = np.zeros(len(examples), bool)
    for rows, batch in eval_batches(examples, batch_size=loop.eval_batch_size or loop.batch_size, buckets=loop.buckets):
        tried = jax.device_get(measured(generator, both, place_rows(batch, devices)))
        mean, _, shown = tried[0]
        known[rows[shown]] = True
        found[:, rows[shown]] = np.stack([mean, *(gain for _, gain, _ in tried)])[:, shown]
    if not known.any():
        return {"contexts": 0}
    utility, before, after, most = map(mean_statistic, found[:, known])
    statistics: dict[str, Statistic] = {
        "utility": utility,
        "utility_gain_before": before,
        "utility_gain": after,
        "utility_gain_minus_before": DifferenceStatistic(after, before),
        "utility_gain_at_most": most,
    }
    return {"contexts": int(known.sum()), **with_intervals(statistics, dialogue_groups(examples.instances)[known])}
