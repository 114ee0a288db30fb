"""What the systems that answer put their stages together from: models, tokenizers, forms of sources."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from empax.core.config import ConfigError, to_settings
from empax.core.files import hash_json
from empax.core.protocols import Task, Tokenizer
from empax.core.run import RunContext, RunOptions
from empax.core.sharding import LOGICAL, MeshSettings, local_mesh, make_mesh, shard_params
from empax.core.tree import hash_tree
from empax.core.types import Instance, Params
from empax.data.chat import PLAIN, chat_template
from empax.data.exemplars import (
    Corpus,
    ExemplarExamples,
)
from empax.data.sources import ChatForm, SourceForm, TaggedForm
from empax.data.store import PlannedTokenizer, run_tokenizer
from empax.data.tokenizers import SubwordTokenizer
from empax.decoding.generation_config import read_generation_config
from empax.decoding.settings import DecodeSettings
from empax.interop.huggingface import resolve
from empax.interop.pretrained import (
    LoadedEncoder,
    LoadedGenerator,
    load_encoder,
    load_generator,
)
from empax.models.decoder_only import DecoderOnly
from empax.models.dual_encoder import EmotionEncoder
from empax.models.fusion_in_decoder import FusionInDecoder
from empax.models.heads import EMOTION_HEAD
from empax.models.layers import logical_axes
from empax.models.lora import lower
from empax.models.prompted import FusionInPrompt, PromptedDecoder
from empax.models.transformer import EncoderDecoder
from empax.retrieval.corpus import CorpusEncoder
from empax.systems.dialogue.generator import Decoder, Fusion, Generator, Reader
from empax.systems.dialogue.settings import DialogueSettings, GeneratorStage
from empax.training.checkpoint import load_params
from empax.training.lora import LoraTask, lora_task


@dataclasses.dataclass(frozen=True)
class Parts:
    """What every stage of a system that answers is put together from."""

    settings: DialogueSettings
    tokenizer: Tokenizer
    generator: LoadedGenerator
    encoder: LoadedEncoder
    mesh: MeshSettings

    @classmethod
    def of(cls, run: RunContext, *, with_params: bool = True, planned: bool = False) -> Parts:
        """The parts of `run`; `with_params` with pretrained ones, the generator's where training has them."""
        system, mesh = run.config["system"], RunOptions.of(run.config).mesh
        settings = to_settings(DialogueSettings, run.section(system), where=f"config.{system}")
        if planned and settings.generator.pretrained and settings.generator.preset:
            tokenizer = PlannedTokenizer(settings.generator.preset_config().vocab_size)
        else:
            tokenizer = run_tokenizer(run, planned=planned)
        with_params = with_params and not planned
        place = functools.partial(places, mesh=make_mesh(mesh), settings=mesh) if with_params else None
        loaded = load_generator(settings.generator, tokenizer, with_params=with_params, planned=planned, place=place)
        return cls(
            settings if planned else with_own_decoding(settings, tokenizer, loaded.model),
            tokenizer,
            loaded,
            load_encoder(settings.retriever, tokenizer, with_params=with_params, planned=planned),
            mesh,
        )

    def decoder(self, settings: DecodeSettings) -> Decoder:
        t, reader = self.tokenizer, self.reader
        # Not the tokenizer's: BART's decoder starts with the token that ends a text.
        start_id = reader.start_id if isinstance(reader, PromptedDecoder) else reader.config.start_id
        return Decoder(settings, start_id=start_id, eos_id=t.eos_id, pad_id=t.pad_id)

    def generator_task(self, stage: GeneratorStage) -> Generator:
        return Generator(
            self.reader,
            EMOTION_HEAD,
            self.decoder(self.settings.decoding),
            emotion_weight=stage.emotion_weight,
            label_smoothing=stage.label_smoothing,
            logits_at_once=self.settings.logits_at_once,
            # One that begins with an earlier stage may have its head from there.
            heads=("generator",) if stage.emotion_weight or stage.start_from else (),
        )

    def with_lora(self, task: Task) -> LoraTask:
        """`task` with adapters in the generator; heads and retriever are trained whole."""
        settings = self.settings.lora
        if settings is None or not self.settings.generator.pretrained:
            raise ConfigError("lora adapts a pretrained generator; set generator.pretrained beside it, or drop it.")
        trained, dtype = r"^(generator/)?emotion/|^retriever/|^value/", self.generator.model.config.dtype
        return lora_task(task, settings, trained=trained, dtype=dtype)

    def merged(self, task: Task, params: Params, base: Params) -> Params:
        """Parameters of `task`: those of `with_lora(task)`, summed into the weights `base`.

        Those are taken as they were loaded, not as training kept them (but for eight bits): what is exported, or
        evaluated in another type, should not have been rounded before.
        """
        adapted = dataclasses.replace(self.with_lora(task), dtype="float32")
        return adapted.merged(params, adapted.freeze(base, {}))

    def lowered(self, params: Params) -> Params:
        """Parameters of a generator that nothing trains, as small as its arithmetic allows (`models.lora.lower`)."""
        return lower(params, self.generator.model.config.dtype) if self.settings.generator.pretrained else params

    def stage_params(self, run: RunContext, stage: str) -> Params:
        """All parameters of a finished stage: adapters are merged into the weights that they sit on."""
        params = load_params(run.files.stage(stage))
        if "adapters" not in params:
            return params
        assert self.settings.lora is not None
        model = self.generator.params
        if model is None or jax.process_count() > 1:  # those of training lie on other processes too
            mesh = local_mesh(self.mesh)
            place = functools.partial(places, mesh=mesh, settings=self.mesh) if mesh else None
            model = load_generator(self.settings.generator, self.tokenizer, place=place).params
        base: Params = {"model": model}
        if "generator" in params["adapters"]:
            base = {"generator": base}
        return jax.tree.map(np.asarray, self.merged(self.generator_task(GeneratorStage()), params, base))

    def retriever_params(self, run: RunContext, stage: str) -> Params:
        """The retriever of a training stage, what that leaves alone as pretrained, or random from the run's seed.

        An empty `stage` has trained nothing.
        """
        trained: Params = {}
        if stage:
            trained = load_params(run.files.stage(stage))
            trained = trained["trained"] if "adapters" in trained else trained
            trained = trained.get("retriever", trained)  # of a joint stage, its retriever
            if "encoder" in trained:
                return trained
        rng = jax.random.key(run.seed)
        ids, mask = jnp.zeros((1, 4), jnp.int32), jnp.ones((1, 4), bool)
        # Compiled as one: op by op it takes seconds.
        fresh = jax.jit(self.retriever.init)(rng, ids, mask)
        if self.encoder.params is not None:
            fresh |= {name: self.encoder.params for name in fresh if name.endswith("encoder")}
        return fresh | trained

    def form(self, *, exemplars: bool = True) -> SourceForm:
        """How the generator is shown its sources; without `exemplars`, rows have no room for one."""
        settings, tokenizer = self.settings, self.tokenizer
        if not isinstance(self.generator.model, DecoderOnly):
            return TaggedForm(tokenizer, settings.layout, settings.attributes)
        template = PLAIN
        if isinstance(tokenizer, SubwordTokenizer) and tokenizer.chat_template:
            names = {name: text for name, text in tokenizer.names.items() if name != "start_token"}
            where = f"the chat template of {tokenizer.source}"
            template = chat_template(tokenizer.chat_template, where=where, **names)
        return ChatForm(tokenizer, settings.layout, settings.attributes, template, exemplars)

    @property
    def reader(self) -> Reader:
        """The generator as tasks see it."""
        model, form = self.generator.model, self.form()
        if isinstance(model, DecoderOnly):
            assert isinstance(form, ChatForm)
            return PromptedDecoder(model, form.prefix, form.start_id)
        return model

    @property
    def fusion(self) -> Fusion:
        """The generator reading several exemplars."""
        reader, form = self.reader, self.form()
        if isinstance(reader, PromptedDecoder):
            assert isinstance(form, ChatForm)
            return FusionInPrompt(reader, form.split)
        return FusionInDecoder(reader)

    @property
    def retriever(self) -> EmotionEncoder:
        """What embeds contexts and exemplars once it has learnt emotions."""
        return EmotionEncoder(self.encoder.model, EMOTION_HEAD, self.settings.emotion_share)

    def corpus(self, instances: Sequence[Instance]) -> Corpus:
        return Corpus.of(instances, self.form(), self.encoder.tokenizer)

    def exemplar_examples(
        self, instances: Sequence[Instance], corpus: Corpus, candidates: np.ndarray, **options: Any
    ) -> ExemplarExamples:
        return ExemplarExamples(
            instances,
            corpus,
            candidates,
            self.form(),
            self.encoder.tokenizer,
            **options,
        )


def with_own_decoding(
    settings: DialogueSettings, tokenizer: Tokenizer, model: EncoderDecoder | DecoderOnly
) -> DialogueSettings:
    """The settings, decoding as the generator's own folder says where they ask for it."""
    if not settings.own_decoding:
        return settings
    found = read_generation_config(
        resolve(settings.generator.pretrained),
        encoder_decoder=isinstance(model, EncoderDecoder),
        changes={"max_new_tokens": settings.decoding.max_tokens, "min_new_tokens": settings.decoding.min_tokens},
    )
    return dataclasses.replace(settings, decoding=found.with_eos(tokenizer.eos_id))


def places(params: Params, mesh: Mesh, settings: MeshSettings) -> Any:
    """Where each of `params`, or their shapes, lies on `mesh` by the names that `settings` split."""
    return shard_params(params, mesh, axes=logical_axes, logical={**LOGICAL, **settings.logical})


def corpus_encoder_of(parts: Parts, retriever: Params, *, trained: bool = True) -> CorpusEncoder:
    """The encoder with a retriever's parameters; one that is not `trained` knows no emotions yet."""
    model = parts.retriever if trained else dataclasses.replace(parts.retriever, share=0.0)
    # Not of how it is planned and trained, which changes no vector.
    without = {"preset", "remat", "unroll", "dropout"}
    made_by: list[Any] = [
        {name: value for name, value in dataclasses.asdict(parts.settings.retriever).items() if name not in without}
    ]
    made_by += [model.share] if model.share else []
    return CorpusEncoder(
        model=model,
        params=retriever,
        tokenizer=parts.encoder.tokenizer,
        max_query_tokens=parts.settings.layout.max_query_tokens,
        max_key_tokens=parts.settings.layout.max_key_tokens,
        # Without a share, no parameter of the emotions reaches a vector.
        hash=hash_json([hash_tree(retriever if model.share else retriever["encoder"]), *made_by]),
    )
