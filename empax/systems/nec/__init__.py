"""NEC: the system (`tasks`), what it reads (`examples`, `facts`, `ranker`) and its stages (`stages`)."""

from empax.core.system import System, TaskSpec
from empax.systems.dialogue.checks import check_system
from empax.systems.nec.ranker import build_ranker, check_ranker, sketch_ranker
from empax.systems.nec.settings import ContrastiveTaskSettings, NecSettings, NecTaskSettings, RankerTaskSettings
from empax.systems.nec.stages import answer_nec, build_nec, check_contrastive, check_nec, sketch_nec

_UNREAD = ("decoding", "passages")

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
                    "selector", *_UNREAD),
        ),
        "generator": TaskSpec(NecTaskSettings, check_nec, build_nec, sketch_nec, answer=answer_nec, unread=_UNREAD),
        "contrastive": TaskSpec(
            ContrastiveTaskSettings, check_contrastive, build_nec, sketch_nec, answer=answer_nec, unread=("passages",)
        ),
    },
    check=check_system,
)  # fmt: skip
