"""EmpRL: the tasks (`tasks`), their rewards and rollouts, and the stages."""

from empax.core.system import RunContext, System, TaskSpec
from empax.parts.exemplars.checks import check_retriever
from empax.parts.exemplars.parts import pretrained_encoder
from empax.parts.exemplars.settings import INDEX_UNREAD, RetrievalSettings
from empax.parts.generator.checks import check_system
from empax.parts.generator.stages import GENERATOR
from empax.systems.emprl.settings import (
    GrpoTaskSettings,
    PolicyTaskSettings,
    PpoTaskSettings,
    PreferenceTaskSettings,
)
from empax.systems.emprl.stages import (
    answer_policy,
    build_policy,
    check_evaluation,
    check_policy,
    sketch_policy,
    trained_policy,
)


def check(run: RunContext) -> None:
    """Checks the generator, and the retriever if a stage embeds texts."""
    check_system(run)
    policies = (one.settings for one in run.plan.stages.values() if isinstance(one.settings, PolicyTaskSettings))
    expects = any(part.goal == "f1" for policy in policies for part in policy.rewards)
    if expects or any(stage.kind == "index" for stage in run.plan.stages.values()):
        check_retriever(run)


TASKS = {
    "generator": GENERATOR,
    **{
        name: TaskSpec(
            settings,
            check_policy,
            build_policy,
            sketch_policy,
            answer=answer_policy,
            check_evaluation=check_evaluation,
            reads_exemplars=lambda stage: bool(stage.index),
            models={"generator": trained_policy},
            refreshes=True,
        )
        for name, settings in (("ppo", PpoTaskSettings), ("grpo", GrpoTaskSettings), ("dpo", PreferenceTaskSettings))
    },
}

SYSTEM = System("emprl", RetrievalSettings, TASKS, encoder=pretrained_encoder, index_unread=INDEX_UNREAD, check=check)
