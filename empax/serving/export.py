"""Export of one model of a run to a folder for other libraries."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, Literal

from empax.core.config import ConfigError, check_numbers
from empax.core.files import WorkDir, read_json
from empax.core.manifest import verify
from empax.core.system import RunContext, RunPlan, Stage
from empax.core.tree import count_params
from empax.decoding.settings import without_unknown
from empax.interop.export import Generation, export_generator, export_retriever
from empax.interop.huggingface import load_config, resolve
from empax.interop.peft import base_beneath, export_adapters
from empax.interop.safetensors_out import SHARD_BYTES, check_new
from empax.interop.sentence_modules import read_modules
from empax.models.decoder_only import DecoderOnly
from empax.parts.generator.trained import Trained
from empax.pipeline import evaluate
from empax.pipeline.plan import read_plan
from empax.pipeline.records import check_origins
from empax.reporting.model_card import Exported, model_card


@dataclasses.dataclass(frozen=True)
class ExportSettings:
    """What to write.

    Attributes:
      stage: the stage of the checkpoint; empty = the last one that trains a model of the system.
      what: name of one of the stage's models; empty = the main one.
      max_shard_bytes: maximum bytes of tensors in one file.
      lora: for a generator trained with adapters: "merged" into its weights, or the "adapters" alone, for PEFT.
    """

    stage: str = ""
    what: Literal["", "generator", "retriever", "key_retriever"] = ""
    max_shard_bytes: int = SHARD_BYTES
    lora: Literal["merged", "adapters"] = "merged"

    def __post_init__(self) -> None:
        check_numbers(self, "max_shard_bytes", least=1, most=2**62)


def export_run(workdir: Path, output: Path, settings: ExportSettings) -> str:
    """Writes one model of the run in `workdir` with a card to the folder `output`; returns a line that describes it.

    Raises:
      ConfigError: the run or stage does not exist, no other library has the model, or `output` is not empty.
      CheckpointError: the stage has not been trained.
    """
    check_new(output)
    files, plan, what, found = _trained(workdir, settings)
    adapters, beneath = settings.lora == "adapters", found.base
    if adapters:
        beneath = base_beneath(
            found.base, found.model.config, kept=False, instead="export with --lora=merged", tokenizer=found.tokenizer
        )
    main = evaluate.main_stage(plan)
    evaluated = plan.stages[main].settings.stage if main else ""
    if main and (step := plan.stages[main].settings.step):
        evaluated += f", step {step}"  # exports have the parameters that the stage chose
    by = main if main and found.what == "generator" and plan.stages[main].settings.decoding is not None else ""
    about = Exported(
        what=found.what,
        stage=found.stage,
        evaluated=evaluated,
        base=beneath,
        passages=found.passages,
        exemplars=found.exemplars,
        before=found.before,
        size=count_params(found.params),
        prompted=isinstance(found.model, DecoderOnly),
        template=found.tokenizer.chat_template is not None,
        plain=found.plain,
        lora=found.lora,
        adapters=adapters,
        rounded=adapters and found.lora.int8,
        key=getattr(plan.system_settings, "key", "exchange"),
        towers=getattr(plan.system_settings, "towers", "shared"),
        evaluated_by=f"config.{by}.decoding" if by else "",
    )
    report = files.root / "report.json"
    if report.exists() and files.stage("report").is_dir():
        verify(report, stage=files.stage("report"))
    card = model_card(about, plan.config, read_json(report) if report.exists() else None)
    base = load_config(read_modules(resolve(found.base), pooling=False).encoder) if found.base else None
    options: dict[str, Any] = {"max_shard_bytes": settings.max_shard_bytes, "base": base, "card": card}
    t = found.tokenizer
    decoding = without_unknown(found.decoding, t.unk_id)
    generation = Generation(dataclasses.asdict(decoding), t.start_id, t.eos_id, t.pad_id)
    if found.what == "retriever":
        # As `data.exemplars` cuts texts: contexts and exchanges keep their end, responses alone their start.
        keep = "start" if what == "key_retriever" else "end"
        export_retriever(output, found.model, found.params, t, max_tokens=found.max_tokens, keep=keep, **options)
    elif adapters:
        assert base is not None  # adapters need a pretrained generator
        export_adapters(
            output, base["model_type"], found.params, found.model.config, found.lora, base=about.base_name,
            tokenizer=t, generation=generation, card=card,
        )  # fmt: skip
    else:
        try:
            export_generator(output, found.model, found.params, t, generation, **options)
        except ConfigError as error:
            raise ConfigError(f"the {what} of stage {found.stage!r}: {error}") from error
    unfinished = "" if files.done(found.stage).exists() else f"; {found.stage} has not finished, these are its best yet"
    what = f"{what}'s adapters" if adapters else what
    return f"wrote the {what} of stage {found.stage}, {about.size:,} parameters, to {output}{unfinished}"


def trained_model(workdir: Path, settings: ExportSettings = ExportSettings()) -> Trained:
    """Loads the model of the run in `workdir` that `settings` select; by default the last stage's main one, merged.

    Raises:
      ConfigError: the run does not exist, or trains no such model.
      CheckpointError: the stage has not been trained.
    """
    return _trained(workdir, settings)[-1]


def _trained(workdir: Path, settings: ExportSettings) -> tuple[WorkDir, RunPlan, str, Any]:
    files = WorkDir(workdir)
    if not files.config.exists():
        raise ConfigError(f"{workdir} holds no run; give the work directory of one.")
    plan = read_plan(files)
    check_origins(files, plan.stages.values())
    stage, what = find_model(plan, settings)
    assert stage.spec is not None  # the stage has models
    made = stage.spec.models[what](stage.settings, RunContext(files, plan, stage.name), settings.lora == "adapters")
    return files, plan, what, made


def find_model(plan: RunPlan, settings: ExportSettings) -> tuple[Stage, str]:
    """Returns the stage that `settings` select, and the name of its model.

    Raises:
      ConfigError: the stage or its model does not exist; the message names the existing ones.
    """
    held = {name: tuple(s.spec.models) for name, s in plan.stages.items() if s.spec is not None and s.spec.models}
    if not held:
        trained = ", ".join(f"{stage.task} in {name!r}" for name, stage in plan.stages.items() if stage.task)
        raise ConfigError(
            f"no stage of this run trains a model that can be exported; it trains {trained or 'nothing'}. Judges need "
            "no export: --empathy of empax.evaluate takes this work directory. For a run with an evaluation, "
            "Session.load answers."
        )
    name = settings.stage or next(reversed(held))
    if name not in held:
        raise ConfigError(
            f"stage = {name!r} trains no model of this run that can be exported; stages that do are {', '.join(held)}."
        )
    what = settings.what or held[name][0]
    if what not in held[name]:
        owners = ", ".join(other for other, models in held.items() if what in models)
        raise ConfigError(
            f"stage {name!r} holds no {what}, only its {held[name][0]}; stages that do: {owners or 'none'}."
        )
    return plan.stages[name], what
