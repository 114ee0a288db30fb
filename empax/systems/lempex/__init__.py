"""LEMPEx: the tasks (`tasks`, `losses`), their examples (`examples`), and the stages."""

from empax.core.config import ConfigError
from empax.core.system import RunContext, System
from empax.models.decoder_only import DecoderOnly
from empax.parts.generator.checks import check_models
from empax.systems.lempex.retriever import RETRIEVER, UNREAD, check_towers, pretrained_towers
from empax.systems.lempex.settings import LempexSettings
from empax.systems.lempex.stages import GENERATOR


def check(run: RunContext) -> None:
    """Checks the generator, which must have an encoder, and the retriever if there is an index."""
    parts = check_models(run)
    if parts is not None and isinstance(parts.generator.model, DecoderOnly):
        raise ConfigError(
            f"{run.shared}.generator is a decoder without an encoder, and LEMPEx reads encoder states; name a T5."
        )
    if any(stage.kind == "index" for stage in run.plan.stages.values()):
        check_towers(run)


TASKS = {"retriever": RETRIEVER, "generator": GENERATOR}

SYSTEM = System("lempex", LempexSettings, TASKS, encoder=pretrained_towers, index_unread=UNREAD, check=check)
