"""EmpRL: the system (`tasks`), its rewards and rollouts, its stages, and what answers when it is trained."""

from empax.systems.dialogue.checks import check_system
from empax.systems.dialogue.settings import DialogueSettings
from empax.systems.dialogue.stages import corpus_encoder
from empax.systems.emprl.stages import TASKS, check_responder, load_responder
from empax.systems.emprl.trained import load_trained

SETTINGS = DialogueSettings

__all__ = ["SETTINGS", "TASKS", "check_responder", "check_system", "corpus_encoder", "load_responder", "load_trained"]
