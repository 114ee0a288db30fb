"""Code shared by stages that train a task with its own encoder: loading, checks, assembly."""

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
    """Loads the encoder of a stage, for its states; a pretrained one needs nothing from the run.

    `with_params` loads weights; `planned` does not, and needs no results of the run.
    """
    tokenizer = None if settings.pretrained else run_tokenizer(run, planned=planned)
    return load_encoder(settings, tokenizer, with_params=with_params and not planned, planned=planned, sentences=False)


def check_encoder(settings: EncoderSettings, run: RunContext, **texts: int) -> LoadedEncoder | None:
    """Raises ConfigError or DataError unless an encoder exists that reads as many tokens as the settings `texts` allow.

    Returns:
      The encoder, without weights; None if a plan may not fetch it.
    """
    if not settings.pretrained:
        check_prepared(run)
    elif not may_load(run, settings.pretrained):
        return None
    encoder = load_stage_encoder(settings, run, with_params=False, planned=not settings.pretrained)
    check_weights(settings.pretrained)
    check_fits(encoder.model, **texts)
    return encoder


def check_buckets(run: RunContext, *, most: int | None = None, **texts: int) -> None:
    """Raises ConfigError if the settings `texts` allow texts longer than the stage's buckets, or than `most`."""
    longest = run.named(run.stage).loop.buckets[-1]
    longest = longest if most is None else min(longest, most)
    for name, tokens in texts.items():
        if tokens > longest:
            raise ConfigError(
                f"config.{run.stage}.{name} = {tokens} is more than the longest bucket; set it to at most {longest}."
            )


def assembled(task: Task, encoder: LoadedEncoder, train: Examples, validation: Examples) -> Assembly:
    """Assembles a task whose "encoder" starts from the pretrained parameters, if there are any."""

    def initial(params: Params) -> Params:
        return params if encoder.params is None else {**params, "encoder": encoder.params}

    return Assembly(task, train, validation, initial=initial)
