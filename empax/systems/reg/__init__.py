"""REG: the system (`tasks`), its stages (`stages`) and what answers when it is trained (`responder`)."""

from empax.systems.dialogue.checks import check_system
from empax.systems.dialogue.settings import DialogueSettings
from empax.systems.dialogue.stages import corpus_encoder
from empax.systems.reg.responder import check_responder, load_responder
from empax.systems.reg.stages import TASKS
from empax.systems.reg.trained import load_trained

SETTINGS = DialogueSettings

__all__ = ["SETTINGS", "TASKS", "check_responder", "check_system", "corpus_encoder", "load_responder", "load_trained"]
