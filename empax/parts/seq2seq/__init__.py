"""Fine-tuning of a pretrained model on sources and targets, with nothing else."""

from empax.core.system import System
from empax.parts.generator.checks import check_system
from empax.parts.generator.settings import DialogueSettings
from empax.parts.generator.stages import GENERATOR

SYSTEM = System("seq2seq", DialogueSettings, {"generator": GENERATOR}, check=check_system)
