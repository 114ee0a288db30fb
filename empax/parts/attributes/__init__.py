"""Judges that several systems share: of emotional reaction, interpretation and exploration, trained on EPITOME.

`classifier` reads one text (REG, LEMPEx), `identifier` a response in its context (EmpRL); `pairs` is what both learn
from, `judges` what comes out. `sentiment` learns VADER's scores of responses (LEMPEx).
"""

from empax.parts.attributes.classifier import ClassifierJudge, ClassifierTaskSettings
from empax.parts.attributes.identifier import IdentifierJudge, IdentifierTaskSettings, make_probabilities
from empax.parts.attributes.judges import (
    JUDGE_TASKS,
    SYSTEM,
    TASKS,
    AttributeSettings,
    Judge,
    check_identifiers,
    judge_kind,
    judge_stage,
    load_holdout,
    load_identifiers,
    load_judge,
)

__all__ = [
    "JUDGE_TASKS",
    "SYSTEM",
    "TASKS",
    "AttributeSettings",
    "ClassifierJudge",
    "ClassifierTaskSettings",
    "IdentifierJudge",
    "IdentifierTaskSettings",
    "Judge",
    "check_identifiers",
    "judge_kind",
    "judge_stage",
    "load_holdout",
    "load_identifiers",
    "load_judge",
    "make_probabilities",
]
