"""ReflectDiffu (Yuan et al. 2025): the annotator of reasons, the classifier of intents, and the generator."""

from empax.core.system import System, TaskSpec
from empax.parts import attributes
from empax.parts.generator.checks import check_contexts
from empax.systems.reflectdiffu import intents, settings, stages

TASKS = {
    "reasons": attributes.TASKS["reasons"],
    "intents": TaskSpec(
        settings.IntentTaskSettings, intents.check_intents, intents.build_intents, intents.sketch_intents
    ),
    "generator": TaskSpec(
        settings.GeneratorTaskSettings,
        stages.check_generator,
        stages.build_generator,
        stages.sketch_generator,
        answer=stages.answer_generator,
        check_evaluation=lambda _, run: check_contexts(run),
    ),
}

SYSTEM = System("reflectdiffu", settings.ReflectSettings, TASKS, check=stages.check_system)
