"""EmpRL: the tasks (`tasks`), their rewards and rollouts, and the stages."""

from empax.core.system import RunContext, System, TaskSpec
from empax.parts.exemplars.checks import check_retriever
from empax.parts.exemplars.parts import pretrained_encoder
from empax.parts.exemplars.settings import INDEX_UNREAD, RetrievalSettings
from empax.parts.generator.checks import check_system
from empax.parts.generator.stages import GENERATOR
from empax.systems.emprl import settings, stages


def check(run: RunContext) -> None:
    """Checks the generator, and the retriever if a stage embeds texts."""
    check_system(run)
    plan = run.plan.stages.values()
    policies = (one.settings for one in plan if isinstance(one.settings, settings.PolicyTaskSettings))
    expects = any(part.goal == "f1" for policy in policies for part in policy.rewards)
    if expects or any(stage.kind == "index" for stage in plan):
        check_retriever(run)


TASKS = {
    "generator": GENERATOR,
    **{
        name: TaskSpec(
            own,
            stages.check_policy,
            stages.build_policy,
            stages.sketch_policy,
            answer=stages.answer_policy,
            check_evaluation=stages.check_evaluation,
            reads_exemplars=lambda stage: bool(stage.index),
            models={"generator": stages.trained_policy},
            refreshes=True,
        )
        for name, own in (
            ("ppo", settings.PpoTaskSettings),
            ("grpo", settings.GrpoTaskSettings),
            ("dpo", settings.PreferenceTaskSettings),
        )
    },
}

SYSTEM = System("emprl", RetrievalSettings, TASKS, encoder=pretrained_encoder, index_unread=INDEX_UNREAD, check=check)
