"""Judges shared by several systems: of emotional reaction, interpretation and exploration, trained on EPITOME.

`classifier` reads one text (REG, LEMPEx), `identifier` a response in its context (EmpRL); `pairs` is the training data
of both. `sentiment` learns VADER's scores of responses (LEMPEx), and `reasons` marks the words that explain an emotion
(ReflectDiffu, and retrievers that read these words alone). This module loads the judges of finished stages.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, TypeAlias, cast

from empax.core.config import ConfigError
from empax.core.files import hash_json
from empax.core.system import RunContext, System, TaskSpec
from empax.core.tree import hash_tree
from empax.parts.attributes.classifier import (
    ClassifierJudge,
    ClassifierTaskSettings,
    build_classifier,
    check_classifier,
    load_classifier,
    sketch_classifier,
)
from empax.parts.attributes.identifier import (
    IdentifierJudge,
    Identifiers,
    IdentifierTaskSettings,
    build_identifier,
    check_identifier,
    check_mechanisms,
    load_identifier,
    sketch_identifier,
)
from empax.parts.attributes.pairs import JudgeTaskSettings, Pair, load_pairs
from empax.parts.attributes.reasons import (
    ReasonTaskSettings,
    build_reasons,
    check_reasons,
    load_finder,
    sketch_reasons,
)
from empax.parts.attributes.sentiment import SentimentTaskSettings, build_sentiment, check_sentiment, sketch_sentiment
from empax.training.checkpoint import load_params

Judge: TypeAlias = ClassifierJudge | IdentifierJudge
"""`(contexts, responses) -> log_probs[N, C, 3]`, with `task.mechanisms`, the names of the C mechanisms, and `hash`."""


def _alone(stage: JudgeTaskSettings | SentimentTaskSettings) -> bool:
    """Whether a judge has its own encoder and tokenizer."""
    return bool(stage.encoder.pretrained)


TASKS = {
    "classifier": TaskSpec(ClassifierTaskSettings, check_classifier, build_classifier, sketch_classifier, alone=_alone),
    "identifier": TaskSpec(IdentifierTaskSettings, check_identifier, build_identifier, sketch_identifier, alone=_alone),
    "sentiment": TaskSpec(SentimentTaskSettings, check_sentiment, build_sentiment, sketch_sentiment, alone=_alone),
    "reasons": TaskSpec(ReasonTaskSettings, check_reasons, build_reasons, sketch_reasons, marker=load_finder),
}

_LOADERS = {"classifier": load_classifier, "identifier": load_identifier}

JUDGE_TASKS = tuple(f"attributes.{name}" for name in _LOADERS)
"""Tasks that train judges of mechanisms, by the names of RunContext.task."""


@dataclasses.dataclass(frozen=True)
class AttributeSettings:
    """`config.attributes` of a recipe that trains judges alone; it is empty: the stages have the judges' settings."""


SYSTEM = System("attributes", AttributeSettings, TASKS)


def judge_kind(run: RunContext, stage_name: str) -> str:
    """Returns the kind of judge that the stage trains, "classifier" or "identifier"; empty if neither."""
    owner, _, task = run.named(stage_name).task.rpartition(".")
    return task if owner == SYSTEM.name and task in _LOADERS else ""


def judge_stage(run: RunContext, stage_name: str) -> JudgeTaskSettings:
    """Returns the settings of a judge's stage; raises ConfigError if the stage trains no judge."""
    if not judge_kind(run, stage_name):
        names = ", ".join(JUDGE_TASKS)
        raise ConfigError(f"config.{stage_name} trains no judge; it must be a training stage of {names}.")
    return run.settings(stage_name, JudgeTaskSettings)


def check_identifiers(run: RunContext, setting: str, stages: Sequence[str]) -> list[IdentifierTaskSettings]:
    """Returns the settings of `stages`, which `setting` names.

    Raises:
      ConfigError: a stage is not earlier or trains no identifiers, or together they do not cover each mechanism once.
    """
    for name in stages:
        run.earlier(setting, name, tasks=("attributes.identifier",))
    found = [run.settings(name, IdentifierTaskSettings) for name in stages]
    check_mechanisms([mechanism for stage in found for mechanism in stage.mechanisms])
    return found


def load_holdout(run: RunContext, stage_name: str) -> list[Pair]:
    """Loads the pairs that the judge of `stage_name` was not trained on."""
    return load_pairs(judge_stage(run, stage_name), run.at(stage_name))[1]


def load_judge(run: RunContext, stage_name: str) -> Judge:
    """Loads the judge of a finished stage."""
    stage: Any = judge_stage(run, stage_name)
    params = load_params(run.files.stage(stage_name))
    made_by = hash_json([hash_tree(params), dataclasses.asdict(stage)])
    return _LOADERS[judge_kind(run, stage_name)](stage, run, params, made_by)


def load_identifiers(run: RunContext, stages: Sequence[str]) -> Identifiers:
    """Loads the identifiers of finished stages that passed `check_identifiers`."""
    return Identifiers(tuple(cast(IdentifierJudge, load_judge(run, name)) for name in stages))
