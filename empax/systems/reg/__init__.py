"""REG: the tasks (`tasks`), their stages (`stages`), and the parts of both (`parts`)."""

import functools

from empax.core.system import RunContext, System, TaskSpec
from empax.parts.exemplars import checks
from empax.parts.exemplars.parts import pretrained_encoder
from empax.parts.exemplars.settings import INDEX_UNREAD
from empax.parts.generator.checks import check_system
from empax.parts.generator.stages import GENERATOR, trained_generator
from empax.systems.reg import settings, stages
from empax.systems.reg.parts import trained_encoder, trained_retriever


def check(run: RunContext) -> None:
    """Checks the generator, and the retriever if a stage embeds texts; see both checks."""
    check_system(run)
    if any(map(checks.embeds, run.plan.stages.values())):
        checks.check_retriever(run)


TASKS = {
    "generator": GENERATOR,
    "emotions": TaskSpec(
        settings.EmotionTaskSettings,
        stages.check_emotions,
        stages.build_emotions,
        stages.sketch_emotions,
        encoder=trained_encoder,
        unread=INDEX_UNREAD,
    ),
    "dense": TaskSpec(
        settings.DenseTaskSettings,
        stages.check_dense,
        stages.build_dense,
        stages.sketch_dense,
        encoder=trained_encoder,
        models={"retriever": trained_retriever},
        unread=INDEX_UNREAD,
    ),
    "retriever": TaskSpec(
        settings.RetrieverTaskSettings,
        stages.check_retriever,
        stages.build_retriever,
        stages.sketch_retriever,
        reads_sources=True,
        encoder=trained_encoder,
        models={"retriever": trained_retriever},
        unread=stages.DECODING,
    ),
    "joint": TaskSpec(
        settings.JointTaskSettings,
        stages.check_joint,
        stages.build_joint,
        stages.sketch_joint,
        answer=stages.answer_joint,
        check_evaluation=stages.check_evaluation,
        searches=True,
        reads_exemplars=lambda _: True,
        encoder=trained_encoder,
        models={"generator": functools.partial(trained_generator, fused=True), "retriever": trained_retriever},
        refreshes=True,
        unread=stages.DECODING,
    ),
}

SYSTEM = System("reg", settings.RegSettings, TASKS, encoder=pretrained_encoder, index_unread=INDEX_UNREAD, check=check)
