"""Fine-tuning of a pretrained model on sources and targets, with nothing else."""

import dataclasses

from empax.core.system import System
from empax.parts.generator.checks import check_system
from empax.parts.generator.settings import DialogueSettings, check_no_exemplars
from empax.parts.generator.stages import GENERATOR


@dataclasses.dataclass(frozen=True)
class Seq2SeqSettings(DialogueSettings):
    """Settings shared by all stages; none of exemplars."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_no_exemplars(self.decoding, self.exemplars)


SYSTEM = System("seq2seq", Seq2SeqSettings, {"generator": GENERATOR}, check=check_system)
