"""Checks of the retriever before a run starts."""

from __future__ import annotations

from empax.core.config import ConfigError
from empax.core.system import RunContext, Stage
from empax.data.store import check_prepared, may_load, run_tokenizer
from empax.decoding.settings import DecodeSettings
from empax.interop.pretrained import check_fits, check_weights
from empax.interop.pretrained_encoders import LoadedEncoder, check_prompts, load_encoder
from empax.parts.exemplars.settings import RetrievalSettings
from empax.retrieval.encode import BUCKETS


def embeds(stage: Stage) -> bool:
    """Whether a stage embeds texts with the retriever, or trains it."""
    return stage.kind == "index" or (stage.spec is not None and stage.spec.encoder is not None)


def check_retriever(run: RunContext) -> LoadedEncoder | None:
    """Checks that the encoder of exemplars exists and reads texts as long as the layout's, without loading weights.

    Raises:
      ConfigError: the model does not exist, texts are too long for it, or no earlier stage marks the reasons it reads.
      DataError: files of the model are missing or broken.

    Returns:
      The encoder, without weights; None if a plan may not fetch it.
    """
    check_prepared(run)
    settings = run.shared_settings(RetrievalSettings)
    name, layout = settings.retriever.pretrained, settings.layout
    for stage in filter(embeds, run.plan.stages.values()):
        check_marked(run.at(stage.name))
    for setting in ("max_query_tokens", "max_key_tokens"):
        if getattr(layout, setting) > BUCKETS[-1]:
            raise ConfigError(
                f"{run.shared}.layout.{setting} = {getattr(layout, setting)} must be at most {BUCKETS[-1]}, "
                "the longest text that a retriever embeds."
            )
    if name and not may_load(run, name):
        return None
    check_weights(name)
    tokenizer = None if name else run_tokenizer(run, planned=True)
    encoder = load_encoder(settings.retriever, tokenizer, with_params=False)
    check_vectors(encoder, name, where=run.shared)
    check_fits(encoder.model, max_query_tokens=layout.max_query_tokens, max_key_tokens=layout.max_key_tokens)
    return encoder


def check_marked(run: RunContext) -> None:
    """Raises ConfigError if the stage embeds contexts by their reasons, and no earlier stage marks any."""
    if run.shared_settings(RetrievalSettings).query != "reasons":
        return
    if not any(stage.kind == "annotate" and stage.settings.reasons for stage in map(run.named, run.before())):
        raise ConfigError(
            f"{run.shared}.query = 'reasons', but no stage before {run.stage!r} marks reasons; put an annotate stage "
            "there whose `reasons` names a stage whose task does, or set the query to 'context'."
        )


def check_passages(decoding: DecodeSettings, where: str) -> None:
    """Raises ConfigError if `decoding`, the section `where`, reads one source: this generator reads passages."""
    if decoding.reads_source:
        raise ConfigError(
            "encoder_no_repeat_ngram and encoder_repetition_penalty look at one source, and this generator reads "
            f"several passages; set them to 0 and 1 in {where}."
        )


def check_vectors(encoder: LoadedEncoder, name: str, *, where: str) -> None:
    """Raises ConfigError if `encoder` excludes prompts from pooling, or compares unnormalized vectors by cosine."""
    check_prompts(encoder.tokenizer.reading, name)
    if encoder.similarity == "cosine" and not encoder.model.normalize:
        raise ConfigError(
            f"{name} compares its vectors by cosine, and an index by dot product; set {where}.retriever.normalize = "
            "True, which makes them the same."
        )
