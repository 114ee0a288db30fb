"""What stages have in common that train a task with an encoder of its own: loading, checks, the assembly."""

from __future__ import annotations

from empax.core.config import ConfigError
from empax.core.protocols import Examples, Task
from empax.core.system import Assembly, RunContext
from empax.core.types import Params
from empax.data.store import check_prepared, may_load, run_tokenizer
from empax.interop.pretrained import check_fits, check_weights
from empax.interop.pretrained_encoders import EncoderSettings, LoadedEncoder, load_encoder


def load_stage_encoder(
    settings: EncoderSettings, run: RunContext, *, with_params: bool = True, planned: bool = False
) -> LoadedEncoder:
    """The encoder of a stage, for its states; a pretrained one needs nothing of the run.

    Weights are read `with_params`; `planned` neither reads them nor asks for what the run is yet to make.
    """
    tokenizer = None if settings.pretrained else run_tokenizer(run, planned=planned)
    return load_encoder(settings, tokenizer, with_params=with_params and not planned, planned=planned, sentences=False)


def check_encoder(settings: EncoderSettings, run: RunContext, **texts: int) -> None:
    """Whether an encoder is there and reads as many tokens as settings of `texts` let a text have; reads no weights.

    Raises:
      ConfigError: no such encoder, or one that reads fewer tokens.
      DataError: its files cannot be read.
    """
    if not settings.pretrained:
        check_prepared(run)
    elif not may_load(run, settings.pretrained):
        return
    encoder = load_stage_encoder(settings, run, with_params=False, planned=not settings.pretrained)
    check_weights(settings.pretrained)
    check_fits(encoder.model, **texts)


def check_buckets(run: RunContext, *, most: int | None = None, **texts: int) -> None:
    """Raises ConfigError if settings of `texts` let a text be longer than the stage's buckets, or than `most`."""
    longest = run.named(run.stage).loop.buckets[-1]
    longest = longest if most is None else min(longest, most)
    for name, tokens in texts.items():
        if tokens > longest:
            raise ConfigError(
                f"config.{run.stage}.{name} = {tokens} is more than the longest of buckets; set it to at most "
                f"{longest}."
            )


def assembled(task: Task, encoder: LoadedEncoder, train: Examples, validation: Examples) -> Assembly:
    """A task whose "encoder" begins as pretrained, where it is."""

    def initial(params: Params) -> Params:
        return params if encoder.params is None else {**params, "encoder": encoder.params}

    return Assembly(task, train, validation, initial=initial)
