"""Fine-tuning of a pretrained model on sources and targets, with nothing else."""

from empax.core.system import System
from empax.systems.dialogue.checks import check_system
from empax.systems.dialogue.settings import DialogueSettings
from empax.systems.dialogue.stages import GENERATOR

SYSTEM = System("seq2seq", DialogueSettings, {"generator": GENERATOR}, check=check_system)
