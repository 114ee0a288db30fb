"""NEC: the tasks (`tasks`), their inputs (`examples`, `facts`, `ranker`) and the stages (`stages`)."""

from typing import Any

from empax.core.system import System, TaskSpec
from empax.systems.nec import ranker, settings, stages

_TRAINED: dict[str, Any] = {
    "answer": stages.answer_nec,
    "check_evaluation": stages.check_lengths,
    "models": {"generator": stages.trained_nec},
}

SYSTEM = System(
    "nec",
    settings.NecSettings,
    {
        "ranker": TaskSpec(
            settings.RankerTaskSettings,
            ranker.check_ranker,
            ranker.build_ranker,
            ranker.sketch_ranker,
            unread=("generator", "layout", "entity", "social", "entity_facts", "facts_as", "social_tokens", "ranker",
                    "selector", "decoding"),
        ),
        "generator": TaskSpec(
            settings.NecTaskSettings, stages.check_nec, stages.build_nec, stages.sketch_nec, unread=("decoding",),
            **_TRAINED,
        ),
        "contrastive": TaskSpec(
            settings.ContrastiveTaskSettings, stages.check_contrastive, stages.build_nec, stages.sketch_nec, **_TRAINED
        ),
    },
    check=stages.check_system,
)  # fmt: skip
