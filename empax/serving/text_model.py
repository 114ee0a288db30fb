"""One model with its tokenizer, for notebooks and scripts: load, generate, score, embed, fine-tune, save."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
from jaxtyping import Float

from empax.core.config import ConfigError
from empax.core.files import hash_json
from empax.core.paths import given_folder
from empax.core.tree import count_params, hash_tree
from empax.core.types import Batch, Params
from empax.data.batches import SequenceExamples
from empax.data.exemplars import warn_of_cut
from empax.data.sources import LayoutSettings, PlainForm
from empax.data.tokenizers import SubwordTokenizer
from empax.decoding.settings import DecodeSettings
from empax.interop.export import export_generator, export_retriever
from empax.interop.huggingface import load_adapted, resolve
from empax.interop.peft import base_beneath, export_adapters
from empax.interop.pretrained import most_tokens
from empax.interop.readers import is_adapter
from empax.models.decoder_only import DecoderOnly
from empax.models.dual_encoder import DualEncoder
from empax.models.lora import LoraSettings, stacked
from empax.models.t5 import T5Encoder, encoder_alone
from empax.models.transformer import EncoderDecoder
from empax.serving.answering import Likelihoods, TextGenerator, check_lengths
from empax.serving.pairs import (
    Pairs,
    Texts,
    batches_of,
    check_whole,
    checked_pairs,
    checked_texts,
    given_turns,
    zipped,
)
from empax.serving.safety import Before, answer_to_danger, without_fixed


@dataclasses.dataclass(frozen=True)
class Adapters:
    """Trained LoRA adapters alone, and the folder or name of their base model; empty = no folder holds its weights."""

    settings: LoraSettings
    params: Params
    base: str


@dataclasses.dataclass(frozen=True, repr=False)
class TextModel:
    """A generator or a text encoder with its tokenizer; `load` makes one.

    Attributes:
      model: the Flax module: an EncoderDecoder, a DecoderOnly, or a DualEncoder, which embeds.
      params: its parameters.
      tokenizer: its tokenizer.
      decoding: default decoding of `generate`: settings, or the unchanged options of the folder's
        generation_config.json.
      source: the folder or file that the model was loaded from.
      fields: fields of its config.json; empty if a run trained it from scratch.
      trained: whether `params` differ from those of `source`.
      adapters: the adapters after fine-tuning with LoRA; `params` already include them.
    """

    model: EncoderDecoder | DecoderOnly | DualEncoder
    params: Params
    tokenizer: SubwordTokenizer
    decoding: DecodeSettings | Mapping[str, Any]
    source: str
    fields: Mapping[str, Any]
    trained: bool = False
    adapters: Adapters | None = None

    @property
    def generator(self) -> TextGenerator:
        """The model's `TextGenerator`; raises ConfigError for an encoder."""
        if isinstance(self.model, DualEncoder):
            raise ConfigError(f"{self.source} is an encoder and generates no text; it has `embed`.")
        return TextGenerator(self.model, self.params, self.tokenizer, self.decoding, self.source)

    def __repr__(self) -> str:
        kind = self.fields.get("model_type", "from scratch")
        return f"TextModel({self.source!r}, {kind}, {count_params(self.params) / 1e6:.1f} M parameters)"

    def generate(self, texts: Texts, *, batch_size: int = 8, seed: int = 0, **options: Any) -> list[str]:
        """Answers each text.

        A model with a chat template treats each text as the first message of a chat. Any other decoder-only model
        continues the text: its answer begins with the blank, if any, between them.

        Args:
          texts: the sources.
          batch_size: number of rows to decode at once.
          seed: seed of sampling.
          options: fields of `decoding.settings.DecodeSettings`, or options of transformers' `generate` with the same
            meaning: `num_beams=4, max_new_tokens=60`, or `do_sample=True, temperature=0.7, top_p=0.9`. None = not
            given, but `top_k=None` keeps all tokens. Options that are not given have the values of the model's folder;
            without a length there, an answer has at most 20 tokens, as in transformers.

        Returns:
          An answer for each text; with `num_return_sequences=k`, k answers for each, those of the first text first.
          `num_samples=k` gives one answer: the likeliest of k samples, or the one that `rerank` prefers.

        Raises:
          ConfigError: the model generates no text, an option is unknown or would change nothing, `texts` are not texts,
            or a text is too long for the model.
        """
        contexts = [(source,) for source in checked_texts(texts, "texts")]
        check_whole("batch_size", batch_size, least=1)
        generator = self.generator
        return generator.answers(contexts, generator.call(options), batch_size=batch_size, seed=seed)

    def reply(
        self,
        turns: Texts | str,
        *,
        before: Before | None = answer_to_danger,
        max_source_tokens: int = 512,
        seed: int = 0,
        **options: Any,
    ) -> str:
        """Answers a conversation.

        A model with a chat template reads it as a chat of user and assistant. Any other model reads one text: one turn
        per line, or turns joined by " | " if its tokenizer has no newlines (T5's).

        Args:
          turns: alternating turns, the oldest first and the user's newest last; a text is a single turn.
          before: a hook that receives the newest turn; unless it returns None, its result replaces the model's answer.
            By default as in a `Session`: messages that seem to speak of self-harm or danger get a fixed answer that
            names help (`serving.safety`), and later replies read neither. None: the model answers everything.
          max_source_tokens: at least 2; a longer conversation keeps the newest turns that fit; a longer turn keeps its
            end. A model with few positions reads what `max_new_tokens` leaves of them; `max_length` counts the
            conversation, too.
          seed: as in `generate`.
          options: as in `generate`, but `no_repeat_ngram_size`, `repetition_penalty` and `bad_words_ids` do not count
            the turns of a chat. Returns one answer, of at most 64 tokens if neither the call nor the model's folder has
            a length.

        Raises:
          ConfigError: there is no turn, a turn is not a text, the answer leaves no position for the conversation, or
            as in `generate`.
        """
        context = without_fixed(given_turns(turns, "turns"))
        check_whole("max_source_tokens", max_source_tokens, least=2)
        generator, most = self.generator, most_tokens(self.model)
        call = generator.reply_call(options)
        if call.num_texts > 1:
            raise ConfigError(f"reply gives one answer, but num_return_sequences = {call.num_texts} asks for more.")
        said = before(context[-1]) if before else None
        if said is not None:
            return said
        if most is not None:
            answer = call.settings.max_tokens if isinstance(self.model, DecoderOnly) else 0
            counted = "max_tokens" in call.counts_prompt  # the conversation's tokens are among them
            left = most - answer
            if left < (0 if counted else 2):
                name = "max_length" if counted else "max_new_tokens"
                raise ConfigError(
                    f"{name} = {answer} does not fit into the {most} positions of {self.source}, some of which the "
                    "conversation needs; lower it."
                )
            max_source_tokens = min(max_source_tokens, most if counted else left)
        given = {"max_tokens": max_source_tokens, "least": 64, "replies": True}
        (answer,) = generator.answers([context], call, batch_size=1, seed=seed, **given)
        return answer.strip()

    def nll(self, sources: Texts, targets: Texts, *, batch_size: int = 8) -> Likelihoods:
        """Returns the likelihood of each target given its source; a target begins with the token that decoding forces.

        Raises:
          ConfigError: the model generates no text, there is not one target for each source, or a text is too long.
        """
        check_whole("batch_size", batch_size, least=1)
        return self.generator.nll(zipped(sources, targets), batch_size=batch_size)

    def embed(self, texts: Texts, *, batch_size: int = 32) -> Float[np.ndarray, "N D"]:
        """Returns one float32 vector for each text; for an encoder-decoder, the mean of its encoder's states.

        A sentence-transformers folder works as in that library: its default prompt is prepended, is pooled or not as
        configured, and texts are truncated at its length limit.

        Raises:
          ConfigError: the model is decoder-only, or a text is too long for it.
        """
        model, params = self.model, self.params
        if isinstance(model, DecoderOnly):
            raise ConfigError(f"{self.source} is decoder-only and embeds no texts; load an encoder or encoder-decoder.")
        if isinstance(model, EncoderDecoder):
            kept = {name: value for name, value in params.items() if name != "decoder"}
            model, params = DualEncoder(T5Encoder(encoder_alone(model.config))), {"encoder": kept}
        ids = self.ids_to_embed(texts)
        check_whole("batch_size", batch_size, least=1)
        check_lengths(self.model, self.source, [len(row) for row in ids])
        ends = [[self.tokenizer.eos_id]] * len(ids)
        examples = SequenceExamples(ids, ends, pad_id=self.tokenizer.pad_id, max_target_tokens=1)
        vectors = np.zeros((len(ids), model.width), np.float32)
        unpooled = 0
        reading = self.tokenizer.reading
        if reading.prompt and not reading.pools_prompt:
            unpooled = len(self.tokenizer.framing[0]) + len(self.tokenizer.encode(reading.prompt))
        for rows, batch in batches_of(examples, batch_size, most=most_tokens(self.model)):
            found, kept = np.asarray(_embed(model, params, batch, unpooled)), rows >= 0
            vectors[rows[kept]] = found[kept]
        return vectors

    def ids_to_embed(self, texts: Texts) -> list[list[int]]:
        """Returns the tokens that `embed` reads of each text, with its prompt and frame."""
        reading, sources = self.tokenizer.reading, checked_texts(texts, "texts")
        form = PlainForm(self.tokenizer, LayoutSettings())
        prompted = [reading.prompt + source for source in sources]
        return form.encode(prompted, max_tokens=reading.max_tokens, keep=reading.keep)

    def finetune(
        self,
        pairs: Pairs,
        *,
        validation: Pairs = (),
        lora: LoraSettings | int | bool = False,
        epochs: int = 3,
        batch_size: int = 8,
        learning_rate: float | None = None,
        max_source_tokens: int = 512,
        max_target_tokens: int = 128,
        seed: int = 0,
        workdir: Path | str | None = None,
    ) -> TextModel:
        """Returns a new model trained to answer sources with their targets; this one does not change.

        Args:
          pairs: training pairs (source, target), or mappings with "source" and "target".
          validation: validation pairs; returns the epoch with the best likelihood on them, or without them the last.
          lora: trains adapters instead of all weights: their settings, their rank, or True for rank 8. A rank adapts
            all linear layers.
          epochs: passes over `pairs`.
          batch_size: pairs per update.
          learning_rate: the peak learning rate, which decays linearly to 0. None: 1e-3 with `lora`, else 1e-4.
          max_source_tokens: a longer source keeps its end; at least 2.
          max_target_tokens: a longer target is truncated, and teaches no end; a warning says if these are over 1%.
          seed: seed of the order of the pairs and of dropout.
          workdir: folder of checkpoints and metrics.jsonl, from which the same call resumes. None: nothing is kept.

        Dropout is that of the model's config.json: none in a Llama, a Qwen or a Mistral.

        Raises:
          ConfigError: the model generates no text, there are no pairs, a row is not a pair, a setting is invalid, or
            `workdir` holds another fine-tuning.
          Interrupted: Ctrl-C or SIGTERM. With `workdir`, progress is kept.
        """
        # Imported here because it is slow and needed only for training.
        from empax.core.system import Assembly
        from empax.serving.finetuning import FinetuneSettings, lora_settings, working_folder
        from empax.training.loop import fit
        from empax.training.lora import lora_task

        learnt, judged = checked_pairs(pairs, "pairs"), checked_pairs(validation, "validation")
        if not learnt:
            raise ConfigError("pairs is empty; give at least one (source, target).")
        values = {"epochs": epochs, "batch_size": batch_size, "learning_rate": learning_rate, "seed": seed}
        values |= {"max_source_tokens": max_source_tokens, "max_target_tokens": max_target_tokens}
        asked, generator = FinetuneSettings.of(values), self.generator
        plain = generator.task(DecodeSettings())
        settings = lora_settings(lora, width=self.model.config.d_model)
        adapted = None if settings is None else lora_task(plain, settings, dtype=self.model.config.dtype)
        train = generator.examples(learnt, lengths=asked.lengths)
        warn_of_cut(train, "finetune")
        held_out = generator.examples(judged, lengths=asked.lengths) if judged else None
        loop = asked.loop(train, held_out, adapters=adapted is not None, most_tokens=most_tokens(self.model))

        inputs = [learnt, judged, dataclasses.asdict(loop), settings and dataclasses.asdict(settings), asked.lengths]
        inputs += [repr(self.model), self.tokenizer.hash, generator.call({}).settings.first_token]
        inputs = hash_json([*inputs, hash_tree(self.params)])
        with working_folder(workdir, inputs, learning_rate=loop.optimizer.learning_rate) as folder:
            found = fit(
                Assembly(
                    adapted or plain,
                    train,
                    held_out,
                    frozen=adapted.freeze({"model": self.params}, {}) if adapted else {},
                    initial=None if adapted else lambda fresh: {**fresh, "model": self.params},
                ),
                settings=loop,
                directory=folder / "finetune",
            ).params
        if adapted is None or settings is None:
            return dataclasses.replace(self, params=found["model"], trained=True, adapters=None)
        whole = dataclasses.replace(adapted, dtype="float32")
        merged = whole.merged(found, whole.freeze({"model": self.params}, {}))
        adapters = Adapters(settings, found["adapters"]["model"], base="" if self.trained else self.source)
        return dataclasses.replace(self, params=merged["model"], trained=True, adapters=adapters)

    def save(self, folder: Path | str, *, format: Literal["transformers", "peft"] = "transformers") -> None:
        """Writes the model with its tokenizer.

        Args:
          folder: new or empty.
          format: "transformers" (sentence-transformers for an encoder), or "peft", the adapters of `finetune(lora=...)`
            alone, including those that it started from.

        Raises:
          ConfigError: the folder is not a path or not empty, the format is unknown, or the model does not support it.
        """
        folder, t = given_folder(folder, "folder"), self.tokenizer
        allowed = ("transformers",) if isinstance(self.model, DualEncoder) else ("transformers", "peft")
        if format not in allowed:
            raise ConfigError(f"format = {format!r} is unknown here; it takes {', '.join(map(repr, allowed))}.")
        if isinstance(self.model, DualEncoder):
            export_retriever(
                folder, self.model, self.params, t, max_tokens=most_tokens(self.model) or 512,
                keep=t.reading.keep, base=self.fields or None,
            )  # fmt: skip
            return
        generation = self.generator.generation()
        if format != "peft":
            export_generator(folder, self.model, self.params, t, generation, base=self.fields or None)
        elif self.adapters is None:
            raise ConfigError(
                'format="peft" writes adapters, and this model has none: finetune(..., lora=8) makes them.'
            )
        elif not self.adapters.base:
            raise ConfigError(
                "these adapters sit on fine-tuned weights that are in no folder: save that model and load "
                'it before finetune(..., lora=8), or save this one whole with format="transformers".'
            )
        else:
            adapters, settings, began = self.adapters.params, self.adapters.settings, self.adapters.base
            base = base_beneath(began, self.model.config, kept=True, instead='save this one with format="transformers"')
            if is_adapter(resolve(began)):  # stack both, since no folder holds the base with the first adapter
                below = load_adapted(resolve(began))
                adapters, settings = stacked(below.adapters, adapters, below.settings, settings, self.params)
            export_adapters(
                folder, self.fields["model_type"], adapters, self.model.config, settings,
                base=base, tokenizer=t, generation=generation,
            )  # fmt: skip


@functools.partial(jax.jit, static_argnums=(0, 3))
def _embed(model: DualEncoder, params: Params, batch: Batch, unpooled: int) -> Any:
    return model.apply({"params": params}, batch.source, batch.source_mask, unpooled=unpooled)
