"""The parts that answer a context: the generator with its tokenizer and the form of its sources."""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
from jax.sharding import Mesh

from empax.core.config import ConfigError
from empax.core.protocols import Tokenizer
from empax.core.sharding import LOGICAL, MeshSettings, local_mesh, make_mesh, shard_params
from empax.core.system import RunContext
from empax.core.types import Params
from empax.data.chat import PLAIN, chat_template
from empax.data.chat_prompts import ChatForm
from empax.data.sources import PlainForm, TaggedForm
from empax.data.store import PlannedTokenizer, run_tokenizer
from empax.data.tokenizers import SubwordTokenizer
from empax.decoding.generation_config import (
    FILE,
    LENGTHS,
    Origin,
    decoding_of,
    generation_fields_of,
    options_that_can_be_had,
)
from empax.decoding.settings import DecodeSettings
from empax.interop.huggingface import generation_folder, resolve
from empax.interop.pretrained import LoadedGenerator, load_generator
from empax.models.decoder_only import DecoderOnly
from empax.models.fusion_in_decoder import FusionInDecoder
from empax.models.heads import EMOTION_HEAD
from empax.models.layers import logical_axes
from empax.models.lora import lower
from empax.models.prompted import FusionInPrompt, PromptedDecoder
from empax.models.transformer import EncoderDecoder
from empax.parts.generator.decoder import Decoder
from empax.parts.generator.settings import DialogueSettings, GeneratorTaskSettings, ResponseTaskSettings
from empax.parts.generator.task import Fusion, Generator, Reader
from empax.training.lora import AdaptableTask, LoraTask, is_adapted, lora_task

log = logging.getLogger("empax")

MAX_REFERENCE_TOKENS = 512


@dataclasses.dataclass(frozen=True)
class GeneratorParts:
    """The parts of every stage of a system that answers.

    Attributes:
      first_token: token that the folder of a generator on plain texts forces at the start of answers; None = none.
      annotated: False leaves attributes out, whatever the settings and the instances' notes say.
    """

    settings: DialogueSettings
    tokenizer: Tokenizer
    generator: LoadedGenerator
    mesh: MeshSettings
    first_token: int | None = None
    annotated: bool = True

    @classmethod
    def of(cls, run: RunContext, *, with_params: bool = True, planned: bool = False) -> GeneratorParts:
        """Returns the parts of `run`; `with_params` loads pretrained weights, placed as in training."""
        settings, mesh = run.shared_settings(DialogueSettings), run.plan.options.mesh
        if planned and settings.generator.pretrained and settings.generator.preset:
            tokenizer = PlannedTokenizer(settings.generator.preset_config().vocab_size)
        else:
            tokenizer = run_tokenizer(run, planned=planned)
        with_params = with_params and not planned
        place = functools.partial(places, mesh=make_mesh(mesh), settings=mesh) if with_params else None
        generator = load_generator(settings.generator, tokenizer, with_params=with_params, planned=planned, place=place)
        if planned:
            return cls(settings, tokenizer, generator, mesh)
        first_token = forced_token(settings, tokenizer, generator.model)
        settings = with_own_decoding(settings, tokenizer, generator.model, silent=True)
        return cls(settings, tokenizer, generator, mesh, first_token)

    def trained_at(self, run: RunContext) -> GeneratorParts:
        """Returns the parts for answers of the stage of `run`, with attributes only if it was trained with some.

        An annotate stage may come between training and evaluation; its attributes would be new to the model.
        """
        return dataclasses.replace(self, annotated=any(run.named(name).kind == "annotate" for name in run.before()))

    def for_answers(self, buckets: Sequence[int] = (), *, passages: int = 0) -> GeneratorParts:
        """Returns the parts without cutting references, so that the likelihood covers all of their words.

        A decoder with learned positions (BART, GPT-2) scores as many as its positions allow after its inputs: a source
        of the longest of `buckets`, with `passages` exemplars.
        """
        config, longest = self.generator.model.config, MAX_REFERENCE_TOKENS
        if config.position == "learned":
            read = self.positions_read(max(buckets, default=self.longest_source(passages)), passages)
            longest = max(min(longest, config.max_positions - read), 2)
        layout = dataclasses.replace(self.settings.layout, max_target_tokens=longest)
        return dataclasses.replace(self, settings=dataclasses.replace(self.settings, layout=layout))

    def longest_source(self, passages: int = 0) -> int:
        """Returns the length of the longest source: that of the layout, or as many tokens as the model has positions.

        A decoder-only model also needs positions for `passages` exemplars and for its answer.
        """
        config, longest = self.generator.model.config, self.settings.layout.max_source_tokens
        if config.position != "learned":
            return longest
        answer = self.settings.decoding.max_tokens * isinstance(self.generator.model, DecoderOnly)
        return min(longest, config.max_positions - self.positions_read(0, passages) - answer)

    def positions_read(self, longest: int, passages: int = 0) -> int:
        """Returns the positions taken before the answer to a source of `longest` tokens; 0 for an encoder-decoder."""
        if not isinstance(self.generator.model, DecoderOnly):
            return 0
        form = self.form(exemplars=passages > 0)
        more = max(passages - 1, 0) * form.split if isinstance(form, ChatForm) else 0
        return (len(form.prefix) if isinstance(form, ChatForm) else 0) + longest + more

    def decoder(self, settings: DecodeSettings) -> Decoder:
        reader = self.reader
        # Not the tokenizer's: BART's decoder starts with the end token.
        start_id = reader.start_id if isinstance(reader, PromptedDecoder) else reader.config.start_id
        chat = isinstance(self.tokenizer, SubwordTokenizer) and bool(self.tokenizer.chat_template)
        return dataclasses.replace(Decoder.of(self.tokenizer, settings), start_id=start_id, counts_prompt=not chat)

    def generator_task(self, stage: ResponseTaskSettings, *, fused: bool = False) -> Generator:
        """Builds the task of a stage; `fused` reads several passages."""
        return Generator(
            self.fusion if fused else self.reader,
            self.decoder(self.settings.decoding),
            EMOTION_HEAD,
            emotion_weight=stage.emotion_weight,
            label_smoothing=stage.label_smoothing,
            heads=("generator",) if stage.teaches_emotions else (),
            contrast=stage.contrast,
            own_losses=stage.losses,
            neighbours=self.settings.neighbours,
        )

    def with_lora(self, task: AdaptableTask) -> LoraTask:
        """Returns `task` with adapters in the generator; parameters that the task names are trained in full."""
        assert self.settings.lora is not None
        return lora_task(task, self.settings.lora, dtype=self.generator.model.config.dtype)

    def merged(self, task: AdaptableTask, params: Params, base: Params) -> Params:
        """Returns the parameters of `task`: those of `with_lora(task)`, merged into the weights `base`.

        The base is in the loaded precision, not in that of training (except for eight bits), so that weights for export
        or for evaluation in another type are not rounded before.
        """
        adapted = dataclasses.replace(self.with_lora(task), dtype="float32")
        return adapted.merged(params, adapted.freeze(base, {}))

    def lowered(self, params: Params) -> Params:
        """Lowers parameters of a frozen generator to the precision of its arithmetic (`models.lora.lower`)."""
        return lower(params, self.generator.model.config.dtype) if self.settings.generator.pretrained else params

    def stage_params(self, run: RunContext, stage: str, which: Literal["best"] | int = "best") -> Params:
        """Loads all parameters of a finished stage, with adapters merged into their base weights.

        `which`: see `training.checkpoint.load_params`.
        """
        from empax.training.checkpoint import load_params  # slow to import, and only needed in runs

        params = load_params(run.files.stage(stage), which)
        if not is_adapted(params):
            return params
        assert self.settings.lora is not None
        model = self.generator.params
        if model is None or jax.process_count() > 1:  # training also places them on other processes
            mesh = local_mesh(self.mesh)
            place = functools.partial(places, mesh=mesh, settings=self.mesh) if mesh else None
            model = load_generator(self.settings.generator, self.tokenizer, place=place).params
        base: Params = {"model": model}
        if "generator" in params["adapters"]:
            base = {"generator": base}
        return jax.tree.map(np.asarray, self.merged(self.generator_task(GeneratorTaskSettings()), params, base))

    def form(self, *, exemplars: bool = True) -> TaggedForm | PlainForm | ChatForm:
        """Returns the form of the generator's sources; without `exemplars`, rows have no room for one."""
        settings, tokenizer = self.settings, self.tokenizer
        prompted, attributes = isinstance(self.generator.model, DecoderOnly), settings.attributes and self.annotated
        if settings.form == "plain":
            assert isinstance(tokenizer, SubwordTokenizer)
            return PlainForm(
                tokenizer, settings.layout, tokenizer.chat_template if prompted else None, self.first_token
            )
        if not prompted:
            framed = bool(settings.generator.pretrained)
            return TaggedForm(tokenizer, settings.layout, attributes, settings.exemplars, framed)
        template = PLAIN
        if isinstance(tokenizer, SubwordTokenizer) and tokenizer.chat_template:
            where = f"the chat template of {tokenizer.source}"
            template = chat_template(tokenizer.chat_template, where=where, **tokenizer.template_tokens)
        shots = settings.exemplars if exemplars else None
        told = tuple(question.name for question in settings.ask_first)
        return ChatForm(tokenizer, settings.layout, attributes, template, shots, told=told)

    @property
    def reader(self) -> Reader:
        """The generator as a model of one source."""
        model = self.generator.model
        if not isinstance(model, DecoderOnly):
            return model
        form = self.form()
        if isinstance(form, ChatForm):
            return PromptedDecoder(model, form.prefix, form.start_id)
        return PromptedDecoder(model)

    @property
    def fusion(self) -> Fusion:
        """The generator as a model of several exemplars; raises ConfigError if it cannot read those of the settings."""
        reader, form, exemplars = self.reader, self.form(), self.settings.exemplars
        if isinstance(form, PlainForm) and (exemplars != "joined" or isinstance(reader, PromptedDecoder)):
            raise ConfigError(
                f"exemplars = {exemplars!r} with form = 'plain': such a source allows only 'joined', an exemplar in "
                "front of the context of an encoder-decoder; set form = 'dialogue'."
            )
        if not isinstance(reader, PromptedDecoder):
            if exemplars == "turns":
                raise ConfigError(
                    "exemplars = 'turns': only a decoder-only generator reads exemplars as turns of a chat; set it to "
                    "'apart' for an encoder-decoder."
                )
            return FusionInDecoder(reader)
        assert isinstance(form, ChatForm)
        if exemplars not in ("apart", "response", "turns"):
            raise ConfigError(
                f"exemplars = {exemplars!r}: a decoder-only generator reads them in front of the context; set it to "
                "'apart', 'response' or 'turns'."
            )
        return FusionInPrompt(reader.model, reader.prefix, reader.start_id, form.split)


def with_own_decoding(
    settings: DialogueSettings, tokenizer: Tokenizer, model: EncoderDecoder | DecoderOnly, *, silent: bool = False
) -> DialogueSettings:
    """Returns the settings, with decoding from the generator's own folder if they ask for it (`own_options`)."""
    if not settings.own_decoding:
        return settings
    folder = generation_folder(resolve(settings.generator.pretrained))
    _, kept = own_options(folder, tokenizer, model, silent=silent)
    # Targets of tagged sources do not begin with a token that the folder forces; see `forced_token`.
    left = LENGTHS if settings.form == "plain" else (*LENGTHS, "forced_bos_token_id")
    fields = {name: value for name, value in kept.items() if name not in left}
    fields |= {"max_new_tokens": settings.decoding.max_tokens, "min_new_tokens": settings.decoding.min_tokens}
    where = Origin(str(folder), lambda name: f"remove {name} from {FILE}")
    found = decoding_of(fields, where, encoder_decoder=isinstance(model, EncoderDecoder))
    return dataclasses.replace(settings, decoding=found.with_eos(tokenizer.eos_id), own_decoding=False)


def forced_token(settings: DialogueSettings, tokenizer: Tokenizer, model: EncoderDecoder | DecoderOnly) -> int | None:
    """Returns the token that targets begin with: on plain texts, the one that an encoder-decoder's folder forces."""
    if settings.form != "plain" or not isinstance(model, EncoderDecoder):
        return None
    folder = generation_folder(resolve(settings.generator.pretrained))
    return own_options(folder, tokenizer, model, silent=True)[1].get("forced_bos_token_id")


def own_options(
    folder: Path, tokenizer: Tokenizer, model: EncoderDecoder | DecoderOnly, *, silent: bool = False
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Reads all decoding options of a folder, and the supported ones among them.

    The log names the others, unless `silent`.

    Raises:
      DataError: the file is broken.
    """
    path, fields = generation_fields_of(folder)
    coded = isinstance(model, EncoderDecoder)
    if path.name != FILE:  # defaults for a folder without the file, below those of config.json
        ids = {"eos_token_id": tokenizer.eos_id, "pad_token_id": tokenizer.pad_id}
        fields = {**ids, **({"decoder_start_token_id": model.config.start_id} if coded else {}), **fields}
    known = {"encoder_decoder": coded, "eos_id": tokenizer.eos_id, "vocab_size": model.config.vocab_size}
    kept, left = options_that_can_be_had(fields, **known)
    if (several := fields.get("num_return_sequences")) not in (None, 1):
        left["num_return_sequences"] = several
    if left and not silent:
        named = ", ".join(f"{name} = {value!r}" for name, value in left.items())
        log.warning("%s: decoding ignores unsupported options (%s) and reads all others.", path, named)
    return fields, kept


def places(params: Params, mesh: Mesh, settings: MeshSettings) -> Any:
    """Returns the sharding on `mesh` of `params`, or of their shapes, by the axes that `settings` split."""
    return shard_params(params, mesh, axes=logical_axes, logical={**LOGICAL, **settings.logical})
