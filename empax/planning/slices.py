"""`--mode=plan --config.plan.topology=v5e:16x16`: a recipe's training steps compiled for absent TPUs.

Memory figures come from the compiler. Operations, traffic and collectives are counted in the partitioned program,
including loop trip counts (`planning.hlo`). Times are estimates from the chip's published peaks:

  compute = FLOPs / peak, memory = bytes / HBM bandwidth, communication = bytes sent in rings / link bandwidth;
  a step takes max(compute, memory) + communication without overlap, and the largest of the three with it.

Utilisation (MFU) counts only the model's FLOPs: recomputation to save memory is not counted.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from empax.core.config import ConfigError
from empax.core.machine import planned_for
from empax.core.sharding import LOGICAL, batch_shards, bytes_on_one, make_mesh, shard_params
from empax.core.system import RunPlan, Stage
from empax.core.tree import count_params
from empax.core.types import TrainState
from empax.models.layers import logical_axes
from empax.pipeline.plan import make_plan
from empax.planning.ahead_of_time import compile_elsewhere, compile_into, libtpu_environment
from empax.planning.hlo import Work
from empax.planning.sketches import sketch_stage, step_flops, trial_flops
from empax.training.programs import make_programs
from empax.training.settings import check_batch_sizes


@dataclasses.dataclass(frozen=True)
class Chip:
    """Published specifications of a TPU.

    Source: the pages of each version at cloud.google.com/tpu/docs.

    Attributes:
      flops: peak in bfloat16, per second.
      hbm: bytes of main memory.
      hbm_bandwidth: bytes per second.
      ici_bandwidth: bytes per second over all links together.
      axes: number of axes of the torus of links; a group along one axis has that share of the bandwidth.
    """

    flops: float
    hbm: float
    hbm_bandwidth: float
    ici_bandwidth: float
    axes: int


CHIPS = {
    "v5e": Chip(197e12, 16 * 2**30, 819e9, 200e9, 2),
    "v5p": Chip(459e12, 95 * 2**30, 2765e9, 600e9, 3),
    "v6e": Chip(918e12, 32 * 2**30, 1640e9, 448e9, 2),
}


@dataclasses.dataclass(frozen=True)
class Estimate:
    """One step on one chip of a topology: an update, or all updates of a reinforced task on its answers.

    Attributes:
      batch: rows on all chips together; for a reinforced task, the contexts that it answers.
      updates: updates in a step.
      parameter_bytes, optimizer_bytes, frozen_bytes: bytes of the trained parameters, the optimizer state, and the
        frozen parameters (a judge, the weights under adapters), on one chip.
      temporary_bytes: further bytes that the step needs at its peak, including activations.
      model_flops: FLOPs of all chips together, without recomputation.
      work: work of one chip, as compiled.
      compute_seconds, memory_seconds, communication_seconds: each alone, at the published peaks.
    """

    chip: Chip
    chips: int
    batch: int
    updates: int
    parameters: int
    parameter_bytes: float
    optimizer_bytes: float
    frozen_bytes: float
    temporary_bytes: float
    model_flops: float
    work: Work
    compute_seconds: float
    memory_seconds: float
    communication_seconds: float

    @property
    def seconds(self) -> float:
        return max(self.compute_seconds, self.memory_seconds) + self.communication_seconds

    @property
    def overlapped_seconds(self) -> float:
        return max(self.compute_seconds, self.memory_seconds, self.communication_seconds)

    def utilisation(self, seconds: float) -> float:
        """Returns the model's FLOPs divided by the peak FLOPs of the chips in that time."""
        return self.model_flops / (self.chips * self.chip.flops * seconds)

    @property
    def state_bytes(self) -> float:
        """Bytes that persist between steps."""
        return self.parameter_bytes + self.optimizer_bytes + self.frozen_bytes

    @property
    def fits(self) -> bool:
        return self.state_bytes + self.temporary_bytes <= self.chip.hbm


def describe_topology(plan: RunPlan, topology: str) -> str:
    """Formats a few lines for each training stage: memory, work, communication, estimated time."""
    lines = [f"{topology}; times are estimates from published peaks"]
    for stage in stages_to_compile(plan):
        found = estimate(plan, stage, topology)
        lines += [f"{stage.name}:", *_lines(found)]
        if trials := trial_flops(sketch_stage(plan, stage)):
            share = trials / found.model_flops
            lines.append(
                f"  not in these numbers: the answers tried out before a step, at most {share:.1f} times the FLOPs of "
                "the model in it"
            )
    return "\n".join(lines)


def stages_to_compile(plan: RunPlan) -> list[Stage]:
    """Returns the stages in `config.plan.stages`; all training stages if that is empty."""
    trained = {name: stage for name, stage in plan.stages.items() if stage.kind == "train"}
    wanted = plan.options.plan.stages or tuple(trained)
    if unknown := [name for name in wanted if name not in trained]:
        raise ConfigError(f"config.plan.stages has {', '.join(unknown)}; the recipe trains {', '.join(trained)}.")
    return [stage for stage in trained.values() if stage.name in wanted]


@dataclasses.dataclass(frozen=True)
class _Laid:
    """A stage's step as training compiles it, and the shapes of its arguments, placed on the devices."""

    step: Any
    template: TrainState
    frozen: Any
    batch: Any

    def lower(self) -> Any:
        return self.step.lower(self.template, self.frozen, self.batch)


def estimate(plan: RunPlan, stage: Stage, topology: str) -> Estimate:
    """Compiles the stage's step for `topology` and estimates its cost.

    Raises:
      ConfigError: the topology is unknown or does not have the mesh, a chip has too little memory, or libtpu is not
        installed.
    """
    chip, devices = chip_of(topology), devices_of(topology)
    laid = lay_out(plan, stage, devices)
    program = compile_elsewhere(functools.partial(write_program, plan.config, stage.name, topology))
    work = program.work()

    def held(tree: Any) -> int:
        return bytes_on_one(tree, jax.tree.map(lambda leaf: leaf.sharding, tree))

    return Estimate(
        chip=chip,
        chips=len(devices),
        batch=stage.loop.batch_size,
        updates=stage.loop.updates_per_batch,
        parameters=count_params(laid.template.params),
        parameter_bytes=held(laid.template.params),
        optimizer_bytes=held(laid.template.opt_state),
        frozen_bytes=held(laid.frozen),
        temporary_bytes=program.temporary_bytes,
        model_flops=model_flops(plan, stage),
        work=work,
        compute_seconds=work.flops / chip.flops,
        memory_seconds=work.hbm_bytes / chip.hbm_bandwidth,
        communication_seconds=sum(one.sent / _bandwidth(chip, one.group, topology) for one in work.collectives),
    )


def lay_out(plan: RunPlan, stage: Stage, devices: Sequence[Any]) -> _Laid:
    """Builds the step of a stage, and the shapes of its arguments, placed on `devices`.

    Raises:
      ConfigError: the devices do not have the mesh, or training could not split the batches over them.
    """
    options = plan.options
    mesh = make_mesh(options.mesh, devices)
    check_batch_sizes(stage.loop, batch_shards(mesh), where=f"config.{stage.name}")
    logical = {**LOGICAL, **options.mesh.logical}
    sketch = sketch_stage(plan, stage).sketch
    programs = make_programs(sketch.task, stage.loop, sketch.batch, mesh=mesh, logical=logical)
    frozen = jax.tree.map(
        lambda leaf, place: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place),
        sketch.frozen,
        shard_params(sketch.frozen, mesh, axes=logical_axes, logical=logical),
    )
    return _Laid(programs.train, programs.template, frozen, sketch.batch)


def write_program(config: Mapping[str, Any], stage: str, topology: str, folder: str) -> None:
    """Makes the compiler write the step of a stage into `folder`."""
    plan = make_plan(config)
    laid = lay_out(plan, plan.stages[stage], devices_of(topology))
    with planned_for("gpu" if topology == "gpu" else "tpu"):
        lowered = laid.lower()
    compile_into(lowered, folder)


def model_flops(plan: RunPlan, stage: Stage) -> float:
    """Counts FLOPs of a step on the whole batch, without recomputation."""
    plain = make_plan(_without_remat(plan.config))
    return step_flops(sketch_stage(plain, plain.stages[stage.name]), stage.loop)


def _without_remat(value: Any) -> Any:
    """Switches off rematerialisation in a plain config, wherever it is set."""
    if isinstance(value, Mapping):
        return {key: "none" if key == "remat" else _without_remat(item) for key, item in value.items()}
    return [_without_remat(item) for item in value] if isinstance(value, (list, tuple)) else value


def chip_of(topology: str) -> Chip:
    """Returns the chip of a topology such as "v5e:16x16"."""
    name, _, shape = topology.partition(":")
    if name not in CHIPS or not shape or not all(size.isdecimal() for size in shape.split("x")):
        raise ConfigError(
            f"config.plan.topology = {topology!r} is unknown; it must be {' or '.join(CHIPS)}, a colon and the sizes "
            "of the slice, as in v5e:16x16 or v5p:4x4x4; or gpu."
        )
    return CHIPS[name]


def devices_of(topology: str) -> list[Any]:
    """Returns the devices of a slice, which need not be present; for "gpu", the first local device."""
    if topology == "gpu":
        return jax.devices()[:1]
    from jax.experimental import topologies

    try:
        with libtpu_environment():
            found = topologies.get_topology_desc(platform="tpu", topology_name=topology)
    except (ImportError, OSError, RuntimeError, ValueError) as error:
        raise ConfigError(
            f"config.plan.topology = {topology!r} cannot be compiled for here ({str(error).splitlines()[0]}); "
            "pip install 'empax[plan]' brings libtpu."
        ) from error
    return list(found.devices)


def _bandwidth(chip: Chip, group: int, topology: str) -> float:
    """Returns a ring's bandwidth: on one axis of the torus that of its links, on several axes that of all links."""
    longest = max(int(size) for size in topology.partition(":")[2].split("x"))
    return chip.ici_bandwidth / chip.axes if group <= longest else chip.ici_bandwidth


def _lines(found: Estimate) -> list[str]:
    chip = found.chip
    share = (found.state_bytes + found.temporary_bytes) / chip.hbm
    updates = f" of {found.updates} updates" if found.updates > 1 else ""
    lines = [
        f"  {found.parameters / 1e6:,.1f} M parameters, {found.batch} rows a step{updates} on {found.chips} chips",
        f"  memory of a chip, GiB: {found.parameter_bytes / 2**30:.2f} parameters, {found.optimizer_bytes / 2**30:.2f} "
        f"optimiser, {found.frozen_bytes / 2**30:.2f} frozen, {found.temporary_bytes / 2**30:.2f} temporary with "
        f"activations; {share:.0%} of {chip.hbm / 2**30:.0f}{'' if found.fits else ': does NOT fit'}",
        f"  work of a chip: {found.model_flops / found.chips / 1e12:.3f} TFLOPs of the model, "
        f"{found.work.flops / 1e12:.3f} compiled, {found.work.hbm_bytes / 1e9:.2f} GB of memory traffic",
    ]
    for one in found.work.collectives:
        largest = f", the largest {one.largest / 1e6:,.1f}" if one.count > 1 else ""
        lines.append(f"  {one.count} x {one.kind} among {one.group}: {one.bytes / 1e6:,.1f} MB{largest}")
    lines.append(
        f"  estimated: compute {found.compute_seconds * 1e3:.1f} ms, memory {found.memory_seconds * 1e3:.1f} ms, "
        f"communication {found.communication_seconds * 1e3:.1f} ms; a step {found.seconds * 1e3:.1f} ms "
        f"(MFU {found.utilisation(found.seconds):.0%}), with overlap {found.overlapped_seconds * 1e3:.1f} ms "
        f"(MFU {found.utilisation(found.overlapped_seconds):.0%})"
    )
    return lines
