"""ReflectDiffu (Yuan et al. 2025): the annotator of reasons, the classifier of intents, and the generator."""

from empax.core.system import System, TaskSpec
from empax.parts.generator.checks import check_contexts
from empax.systems.reflectdiffu.intents import build_intents, check_intents, sketch_intents
from empax.systems.reflectdiffu.reasons import build_reasons, check_reasons, load_finder, sketch_reasons
from empax.systems.reflectdiffu.settings import (
    GeneratorTaskSettings,
    IntentTaskSettings,
    ReasonTaskSettings,
    ReflectSettings,
)
from empax.systems.reflectdiffu.stages import (
    answer_generator,
    build_generator,
    check_generator,
    check_system,
    sketch_generator,
)

TASKS = {
    "reasons": TaskSpec(ReasonTaskSettings, check_reasons, build_reasons, sketch_reasons, marker=load_finder),
    "intents": TaskSpec(IntentTaskSettings, check_intents, build_intents, sketch_intents),
    "generator": TaskSpec(
        GeneratorTaskSettings,
        check_generator,
        build_generator,
        sketch_generator,
        answer=answer_generator,
        check_evaluation=lambda _, run: check_contexts(run),
    ),
}

SYSTEM = System("reflectdiffu", ReflectSettings, TASKS, check=check_system)
