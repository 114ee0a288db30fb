"""What is known to be wrong with a system that answers before any work: models, tokenizer, lengths, other stages."""

from __future__ import annotations

from empax.core.config import ConfigError, to_settings
from empax.core.run import RunContext
from empax.core.sharding import MeshSettings
from empax.core.types import Instance
from empax.data.features import SPECIAL_TOKENS
from empax.data.store import PlannedTokenizer, check_candidates, check_prepared, may_load, run_tokenizer
from empax.data.tokenizers import SubwordTokenizer
from empax.interop.pretrained import LoadedEncoder, check_fits, check_weights, load_encoder, load_generator
from empax.models.decoder_only import DecoderOnly
from empax.retrieval.encode import BUCKETS
from empax.systems.dialogue.parts import Parts, with_own_decoding
from empax.systems.dialogue.settings import DialogueSettings, GeneratorStage

GENERATOR_TASKS = ("generator",)
RETRIEVER_TASKS = ("emotions", "retriever", "joint")
"""Whose checkpoints hold a retriever."""

TWO_ROWS = (
    Instance("one#2", ("I lost my keys today.",), "Oh no, did you find them?", ""),
    Instance("two#4", ("I got the job!", "Great!", "Thank you."), "You must be so proud.", ""),
)
"""On which functions are tried."""


def dialogue_settings(run: RunContext) -> DialogueSettings:
    system = run.config["system"]
    return to_settings(DialogueSettings, run.section(system), where=f"config.{system}")


def check_system(run: RunContext) -> None:
    """Whether the models that all stages share are there and fit their tokenizer; reads no weights.

    Raises:
      ConfigError: no such model, a tokenizer without the tokens that the generator reads, or texts too long for it.
      DataError: files of a model are missing or broken.
    """
    check_prepared(run)
    settings, where = dialogue_settings(run), f"config.{run.config['system']}"
    generator, retriever = settings.generator, settings.retriever
    if settings.lora is not None and not generator.pretrained:
        raise ConfigError(f"{where}.lora adapts a pretrained generator; set generator.pretrained, or lora to None.")
    section = run.section("prepare").get("tokenizer", {})
    models = (generator.pretrained, generator.embeddings, retriever.pretrained)
    if not all(may_load(run, name) for name in (*models, section.get("pretrained", "")) if name):
        return
    for name in models:
        check_weights(name)
    tokenizer = run_tokenizer(run, planned=True)
    loaded = load_generator(generator, tokenizer, with_params=False)
    encoder = load_encoder(retriever, tokenizer, with_params=False)
    check_similarity(encoder, retriever.pretrained, where=where)
    settings = with_own_decoding(settings, tokenizer, loaded.model)
    first = settings.decoding.first_token
    if first is not None and first >= tokenizer.vocab_size:
        raise ConfigError(f"{where}.decoding.first_token = {first} must be below {tokenizer.vocab_size}, or None.")
    parts = Parts(settings, tokenizer, loaded, encoder, MeshSettings())
    if isinstance(tokenizer, PlannedTokenizer):
        _check_lengths(run, parts)
        return
    assert isinstance(tokenizer, SubwordTokenizer)
    missing = [token for token in SPECIAL_TOKENS if tokenizer.backend.token_to_id(token) is None]
    if missing and not isinstance(loaded.model, DecoderOnly):
        raise ConfigError(
            f"the tokenizer {section['pretrained']!r} lacks {', '.join(missing)}, which an encoder-decoder reads; set "
            "config.prepare.tokenizer.tags = True."
        )
    parts.form().contexts(TWO_ROWS)
    parts.form().passages(TWO_ROWS)
    _check_lengths(run, parts)


def check_similarity(encoder: LoadedEncoder, name: str, *, where: str) -> None:
    """Raises ConfigError if the vectors of `encoder` are meant to be compared by something else than an index does."""
    if encoder.similarity == "cosine" and not encoder.model.normalize:
        raise ConfigError(
            f"{name} compares its vectors by cosine, and an index by dot product; set {where}.retriever.normalize = "
            "True, which makes them the same."
        )


def _check_lengths(run: RunContext, parts: Parts) -> None:
    layout, decoding = parts.settings.layout, parts.settings.decoding
    check_fits(parts.encoder.model, max_query_tokens=layout.max_query_tokens, max_key_tokens=layout.max_key_tokens)
    for name in ("max_query_tokens", "max_key_tokens"):
        if getattr(layout, name) > BUCKETS[-1]:
            raise ConfigError(
                f"config.{run.config['system']}.layout.{name} = {getattr(layout, name)} must be at most {BUCKETS[-1]}, "
                "the longest text that a retriever embeds."
            )
    model = parts.generator.model
    answers = {"max_target_tokens": layout.max_target_tokens, "max_tokens": decoding.max_tokens}
    longest = {name: run.config[name]["buckets"][-1] for name in run.config["run"] if _reads_sources(run, name)}
    if not isinstance(model, DecoderOnly):
        check_fits(model, **answers, **{f"{name}.buckets": tokens for name, tokens in longest.items()})
        return
    # One row of positions for prompt, source and answer.
    form, answer = parts.form(), max(answers.values())
    prefix = len(form.prefix) if hasattr(form, "prefix") else 0  # pyright: ignore[reportAttributeAccessIssue]
    check_fits(model, **{f"prompt + {name}.buckets + answer": prefix + n + answer for name, n in longest.items()})


def _reads_sources(run: RunContext, stage: str) -> bool:
    """Whether a stage's buckets are lengths of the generator's sources."""
    own = run.task(stage).rpartition(".")[2] in ("generator", "retriever", "joint", "ppo", "grpo")
    return own or (run.config[stage]["kind"] == "evaluate" and "buckets" in run.config[stage])


def check_generator(stage: GeneratorStage, run: RunContext) -> None:
    """Whether the stages that a generator begins with are there.

    Raises:
      ConfigError: they are not, come later, or leave something else.
    """
    check_prepared(run)
    if stage.start_from:
        run.earlier("start_from", stage.start_from, tasks=GENERATOR_TASKS)
    if stage.index:
        check_candidates(run, stage.index, ("train",), dialogue_settings(run).passages)
