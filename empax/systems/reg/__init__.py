"""REG: the system (`tasks`), its stages (`stages`) and what answers when it is trained (`responder`)."""

from empax.systems.reg.responder import load_responder
from empax.systems.reg.settings import RegSettings
from empax.systems.reg.stages import TASKS, corpus_encoder
from empax.systems.reg.trained import load_trained

SETTINGS = RegSettings

__all__ = ["SETTINGS", "TASKS", "corpus_encoder", "load_responder", "load_trained"]
