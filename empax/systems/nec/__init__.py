"""NEC: the tasks (`tasks`), their inputs (`examples`, `facts`, `ranker`) and the stages (`stages`)."""

from typing import Any

from empax.core.system import System, TaskSpec
from empax.systems.nec.ranker import build_ranker, check_ranker, sketch_ranker
from empax.systems.nec.settings import ContrastiveTaskSettings, NecSettings, NecTaskSettings, RankerTaskSettings
from empax.systems.nec.stages import (
    answer_nec,
    build_nec,
    check_contrastive,
    check_lengths,
    check_nec,
    check_system,
    sketch_nec,
    trained_nec,
)

_TRAINED: dict[str, Any] = {
    "answer": answer_nec,
    "check_evaluation": check_lengths,
    "models": {"generator": trained_nec},
}

SYSTEM = System(
    "nec",
    NecSettings,
    {
        "ranker": TaskSpec(
            RankerTaskSettings,
            check_ranker,
            build_ranker,
            sketch_ranker,
            unread=("generator", "layout", "entity", "social", "entity_facts", "facts_as", "social_tokens", "ranker",
                    "selector", "decoding"),
        ),
        "generator": TaskSpec(NecTaskSettings, check_nec, build_nec, sketch_nec, unread=("decoding",), **_TRAINED),
        "contrastive": TaskSpec(ContrastiveTaskSettings, check_contrastive, build_nec, sketch_nec, **_TRAINED),
    },
    check=check_system,
)  # fmt: skip
