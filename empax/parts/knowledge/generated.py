"""Facts that models write: a COMET, or a language model with a few-shot prompt."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from empax.core.config import ConfigError
from empax.core.files import hash_json
from empax.core.machine import fetched
from empax.core.progress import Progress
from empax.core.tree import hash_tree
from empax.core.types import Instance, Params
from empax.data.batches import SequenceExamples, eval_batches
from empax.data.knowledge import SOCIAL_RELATIONS, Fact, ranked
from empax.data.sources import LayoutSettings, PlainForm
from empax.data.tokenizer_folders import load_tokenizer
from empax.data.tokenizers import SubwordTokenizer
from empax.data.wordnet import WordNet
from empax.decoding.settings import DecodeSettings
from empax.interop.huggingface import resolve
from empax.interop.pretrained import GeneratorSettings, load_generator
from empax.models.decoder_only import DecoderOnly
from empax.models.prompted import PromptedDecoder
from empax.models.transformer import EncoderDecoder
from empax.parts.generator.decoder import Decoder
from empax.parts.generator.task import Reader
from empax.parts.knowledge.atomic import prompt, spoken_tail
from empax.parts.knowledge.settings import SourceSettings

_BUCKETS = (16, 32, 64, 128, 256)


@dataclasses.dataclass(frozen=True)
class Writer:
    """A model that generates texts from prompts, the likeliest first."""

    model: Reader
    params: Params
    tokenizer: SubwordTokenizer
    decoder: Decoder
    batch_size: int

    @functools.cached_property
    def hash(self) -> str:
        """A hash of everything that changes a text."""
        read = repr(self.model), self.tokenizer.hash, dataclasses.asdict(self.decoder)
        return hash_json([hash_tree(self.params), *read])

    @functools.cached_property
    def _write(self) -> Callable[..., Any]:
        return jax.jit(lambda params, source, mask: self.decoder(self.model, params, source, mask, jax.random.key(0)))

    def __call__(
        self, sources: Sequence[Sequence[int]], *, progress: str | None = None
    ) -> list[list[tuple[str, float]]]:
        """Returns texts with their log-probabilities for each source; a source that is too long keeps its last ids."""
        if not sources:
            return []
        nothing = [[self.tokenizer.eos_id]] * len(sources)
        examples = SequenceExamples(sources, nothing, pad_id=self.tokenizer.pad_id, max_target_tokens=1)
        found: list[list[tuple[str, float]]] = [[] for _ in sources]
        with Progress(progress, total=len(sources), unit="texts") as shown:
            batches = eval_batches(examples, batch_size=self.batch_size, buckets=_BUCKETS)
            asked = ((rows, self._write(self.params, one.source, one.source_mask)) for rows, one in batches)
            for indices, made in fetched(asked):
                for row in np.flatnonzero(indices >= 0):
                    texts = [self.tokenizer.decode([int(t) for t in tokens]).strip() for tokens in made.tokens[row]]
                    found[indices[row]] = list(zip(texts, map(float, made.log_probs[row]), strict=True))
                shown.advance(int((indices >= 0).sum()))
        return found


def load_writer(settings: SourceSettings, decoding: DecodeSettings, *, prefix: str = "") -> Writer:
    """Loads the model of `settings`, or raises ConfigError; a decoder-only one reads `prefix` before every text."""
    tokenizer = load_tokenizer(resolve(settings.path))
    loaded = load_generator(_generator(settings), tokenizer)
    model: Reader
    if isinstance(loaded.model, DecoderOnly):
        model, start_id = PromptedDecoder(loaded.model, tuple(tokenizer.encode(prefix))), None
    else:
        model, start_id = loaded.model, loaded.model.config.start_id
    decoder = Decoder(decoding, start_id, tokenizer.eos_id, tokenizer.pad_id)
    return Writer(model, loaded.params, tokenizer, decoder, settings.batch_size)


def _generator(settings: SourceSettings) -> GeneratorSettings:
    return GeneratorSettings("pretrained", settings.path, dropout=0.0)


def check_model(settings: SourceSettings) -> None:
    """Raises ConfigError unless the model of "comet" is an encoder-decoder, and that of "llm" not; reads no weights."""
    loaded = load_generator(_generator(settings), load_tokenizer(resolve(settings.path)), with_params=False)
    coded = isinstance(loaded.model, EncoderDecoder)
    if settings.source == "comet" and not coded:
        raise ConfigError(
            f'source = "comet": {settings.path} is not an encoder-decoder; source = "llm" prompts other models.'
        )
    if settings.source == "llm" and coded:
        raise ConfigError(
            f'source = "llm": {settings.path} is not a decoder-only model; source = "comet" asks other models.'
        )


@dataclasses.dataclass(frozen=True)
class Comet:
    """A sequence-to-sequence model trained on ATOMIC, prompted as by its authors.

    About people: the last turn and the relation. About things: the context, "in this case" and the thing (NEC, Eq. 2
    and 5). Tails about people are in the first person, as those of `sources.NearestEvent`.
    Source: Hwang et al. 2021; NEC's code for the beams.
    """

    writer: Writer
    name: str
    relations: tuple[str, ...]
    tails: int
    wordnet: WordNet | None

    @classmethod
    def of(cls, settings: SourceSettings, relations: tuple[str, ...]) -> Comet:
        """Loads the model that `settings` name, for `relations`, if it passes `check_model`."""
        things = any(relation not in SOCIAL_RELATIONS for relation in relations)
        writer = load_writer(settings, DecodeSettings("beam", 24, num_beams=settings.tails))
        wordnet = WordNet(Path(settings.entities)) if things else None
        return cls(writer, f"COMET {settings.path}", relations, settings.tails, wordnet)

    @property
    def hash(self) -> str:
        things = self.wordnet.hash if self.wordnet else ""
        return hash_json(["comet, in the first person", self.writer.hash, self.relations, self.tails, things])

    def find(self, instances: Sequence[Instance], split: str) -> list[tuple[list[Fact], int]]:
        """Returns the facts of each instance; a shared prompt is run once."""
        asked = [self._questions(instance) for instance in instances]
        prompts = list(dict.fromkeys(text for questions in asked for _, _, text in questions))
        form = PlainForm(self.writer.tokenizer, LayoutSettings())
        ids = form.encode(prompts, max_tokens=_BUCKETS[-1])
        progress = f"facts: {split}" if len(prompts) > 1 else None
        answers = dict(zip(prompts, self.writer(ids, progress=progress), strict=True))
        found = []
        for questions in asked:
            told = [(head, relation, *answer) for head, relation, text in questions for answer in answers[text]]
            facts = [Fact(head, relation, tail, score=score) for head, relation, tail, score in told]
            facts = [dataclasses.replace(f, tail=spoken_tail(f.tail)) if f.social else f for f in facts]
            found.append((ranked(facts, most=self.tails), 0))
        return found

    def _questions(self, instance: Instance) -> list[tuple[str, str, str]]:
        """Returns head, relation and prompt of every question."""
        last, whole = instance.context[-1], " ".join(instance.context)
        people = [(last, r, prompt(last, r)) for r in self.relations if r in SOCIAL_RELATIONS]
        if self.wordnet is None:
            return people
        things = [
            (entity, r, prompt(f"{whole}, in this case, {entity}", r))
            for entity in self.wordnet.entities(whole)
            for r in self.relations
            if r not in SOCIAL_RELATIONS
        ]
        return [*people, *things]


_LINES = {"xReact": "Feels", "xNeed": "Needed", "xIntent": "Intended", "xEffect": "Then", "xWant": "Wants"}

_SHOWN = (
    ("I lost my dog yesterday. I can't stop crying.",
     ("sad", "to have a dog", "to keep him safe", "looks for him everywhere", "to find the dog")),
    ("I finally passed my driving test!",
     ("proud", "to practise", "to be allowed to drive", "gets a licence", "to buy a car")),
    ("My boss shouted at me in front of everybody.",
     ("humiliated", "to go to work", "to do the job well", "turns red", "to quit")),
)  # fmt: skip
"""Hand-written examples in the prompt of a language model."""


@dataclasses.dataclass(frozen=True)
class Prompted:
    """A language model with three examples in its prompt that writes a line about each relation; parsed strictly.

    Departure: NEC uses COMET. A model of this size copies its examples, and much of its output is vague.
    """

    writer: Writer
    name: str

    @classmethod
    def of(cls, settings: SourceSettings) -> Prompted:
        """Loads the model that `settings` name, if it passes `check_model`."""
        shown = "".join(f"{question(text)} {tails[0]}\n{_rest(tails)}\n\n" for text, tails in _SHOWN)
        writer = load_writer(settings, DecodeSettings("greedy", 48), prefix=shown)
        return cls(writer, f"{settings.path}, three examples shown")

    @property
    def hash(self) -> str:
        return hash_json(["llm", self.writer.hash, _SHOWN])

    def find(self, instances: Sequence[Instance], split: str) -> list[tuple[list[Fact], int]]:
        """Returns the facts of each instance, and how many lines could not be parsed."""
        texts = list(dict.fromkeys(instance.context[-1] for instance in instances))
        ids = self.writer.tokenizer.encode_batch([question(text) for text in texts])
        written = self.writer(ids, progress=f"facts: {split}" if len(texts) > 1 else None)
        parsed = {text: parse(text, answers[0][0]) for text, answers in zip(texts, written, strict=True)}
        return [parsed[instance.context[-1]] for instance in instances]


def question(text: str) -> str:
    """Returns the prompt of an answer: the text on one line, and the name of the first line."""
    return f"{' '.join(text.split())}\n{_LINES['xReact']}:"


def _rest(tails: Sequence[str]) -> str:
    names = list(_LINES.values())
    return "\n".join(f"{name}: {tail}" for name, tail in zip(names[1:], tails[1:], strict=True))


def parse(head: str, written: str) -> tuple[list[Fact], int]:
    """Parses the facts of an answer, and counts how many of its five lines are malformed.

    A line must be in its place, under its name, and have 1 to 12 words. Text after a blank line is ignored.
    """
    lines = f"{_LINES['xReact']}:{written}".split("\n\n")[0].split("\n")
    facts = []
    for place, (relation, name) in enumerate(_LINES.items()):
        found, colon, tail = (lines[place] if place < len(lines) else "").partition(":")
        tail = tail.strip()
        if found.strip() == name and colon and 1 <= len(tail.split()) <= 12 and ":" not in tail:
            facts.append(Fact(head, relation, tail))
    return ranked(facts), len(_LINES) - len(facts)
