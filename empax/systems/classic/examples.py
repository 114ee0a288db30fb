"""Random-access examples of word-level contexts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool, Int

from empax.core.protocols import Tokenizer
from empax.core.types import Instance
from empax.data import features
from empax.data.exemplars import LabelledExamples, padded
from empax.data.knowledge import SOCIAL_RELATIONS, clauses, facts_of
from empax.data.spans import place_contexts
from empax.data.tokenizers import LISTENER_TOKEN, SPEAKER_TOKEN
from empax.systems.classic.alignment import AlignmentSettings
from empax.systems.classic.concepts import ConceptPicker
from empax.systems.classic.readers import COGNITION, FEELINGS, ClassicBatch, ConceptWords, FactTexts
from empax.systems.classic.settings import ClassicSettings


class ClassicExamples(LabelledExamples):
    """Instances as random-access examples (`core.protocols.Examples`).

    A source is [CLS], the word of the emotion if `emotions` are given, and the words of all turns. Source: MoEL's
    released code.

    Args:
      instances: N instances.
      tokenizer: has `<speaker>` and `<listener>`.
      settings: lengths, and readers of facts: by relation (CEM), or of the last turn and its clauses (CASE).
      emotional: mask of the ids that are emotion words.
      emotions: the emotion to prepend to each instance's context, a word; None = none.
      picker: picks the concepts of words from an instance's facts; None = no concepts. Source: KEMP.
      train: adds the turn after each response if there are critics. Source: EmpDG.
      max_target_tokens: maximum length of a response, including the end token; 0 = as in the settings.
    """

    def __init__(
        self,
        instances: Sequence[Instance],
        tokenizer: Tokenizer,
        settings: ClassicSettings,
        emotional: Bool[np.ndarray, " V"],
        *,
        emotions: Sequence[str] | None = None,
        picker: ConceptPicker | None = None,
        train: bool = False,
        max_target_tokens: int = 0,
    ):
        self.emotional, self.picker = emotional, picker
        prefixes = [[] for _ in instances] if emotions is None else tokenizer.encode_batch(list(emotions))
        room = settings.max_context_tokens - max(map(len, prefixes), default=0)
        contexts = [i.context for i in instances]
        placed = place_contexts(tokenizer, contexts, max_tokens=room, first=tokenizer.cls_id)
        listener, speaker = (tokenizer.token_id(token) for token in (LISTENER_TOKEN, SPEAKER_TOKEN))
        self.sources, self.speakers = [], []
        for row, context, prefix in zip(placed, contexts, prefixes, strict=True):
            first, *words = row.ids
            said = (speaker if own else listener for own in row.told(len(context))[1:])
            self.sources.append([first, *prefix, *words])
            self.speakers.append([first, *(first for _ in prefix), *said])
        responses = tokenizer.encode_batch([i.response for i in instances])
        super().__init__(instances, responses, tokenizer, max_target_tokens or settings.max_target_tokens)
        if train and settings.adversary is not None:
            most = settings.max_target_tokens
            following = [row[:most] for row in tokenizer.encode_batch(_following(instances))]
            self.fixed["feedback"], self.fixed["feedback_mask"] = features.pad(following, most, self.pad_id)
        if "refinement" in settings.readers:
            related = [_related(i, tokenizer, settings.facts_tokens) for i in instances]
            sizes = len(SOCIAL_RELATIONS), settings.facts_tokens
            self.fixed["facts"], self.fixed["facts_mask"] = pad_each(related, *sizes, self.pad_id)
        if "alignment" in settings.readers:
            self.fixed["cognition"] = _fact_texts(instances, tokenizer, settings.alignment)
        if picker is not None and picker.settings.most:
            concepts = [picker(words, facts_of(i)) for words, i in zip(self.sources, instances, strict=True)]
            self.fixed["concepts"] = _concept_words(concepts, picker, self.pad_id)
        self.lengths = np.array([[len(s), len(t)] for s, t in zip(self.sources, self.targets, strict=True)])

    def collate(self, indices: np.ndarray, length: int, rng: np.random.Generator) -> ClassicBatch:
        """Collates rows (-1 = filler) into numpy arrays; does not use `rng`."""
        del rng
        rows = [int(i) for i in indices]
        arrays = self.columns(rows, padded(self.sources, rows, length, self.pad_id))
        arrays["speaker"], _ = padded(self.speakers, rows, length, self.pad_id)
        arrays["emotional"] = self.emotional[arrays["source"]] & arrays["source_mask"]
        if self.picker is not None:
            arrays["intensity"] = self.picker.intensities[arrays["source"]] * arrays["source_mask"]
        return ClassicBatch(**arrays)


def pad_each(
    texts: Sequence[Sequence[Sequence[int]]], most: int, length: int, pad_id: int
) -> tuple[Int[np.ndarray, "N M S"], Bool[np.ndarray, "N M S"]]:
    """Pads the texts of each row, at most `most`, to `length` tokens; returns ids and mask."""
    ids, mask = features.pad([ids for row in texts for ids in [*row, *[[]] * (most - len(row))]], length, pad_id)
    return ids.reshape(-1, most, length), mask.reshape(-1, most, length)


def _concept_words(rows: Sequence[Sequence[tuple[int, int]]], picker: ConceptPicker, pad_id: int) -> ConceptWords:
    """Pads the concepts of sources, with the positions of their words."""
    most = picker.settings.most
    words, mask = features.pad([[word for word, _ in row] for row in rows], most, pad_id)
    place, _ = features.pad([[place for _, place in row] for row in rows], most, -1)
    arrays: Any = words, mask, place, picker.intensities[words] * mask
    return ConceptWords(*arrays)


def _fact_texts(instances: Sequence[Instance], tokenizer: Tokenizer, sizes: AlignmentSettings) -> FactTexts:
    """Encodes and pads the last turn of each context, its clauses, and their facts."""
    rows, turns = [_followed(i, tokenizer, sizes) for i in instances], 1 + sizes.clauses
    lengths = {
        "turns": (turns, sizes.tokens),
        "feelings": (turns, sizes.tokens),
        "tails": (sizes.facts, sizes.tail_tokens),
    }
    arrays: dict[str, Any] = {}
    for name, (most, length) in lengths.items():
        texts = [row[name] for row in rows]
        arrays[name], arrays[f"{name}_mask"] = pad_each(texts, most, length, tokenizer.pad_id)
    for name, none in (("of", -1), ("relation", 0)):
        arrays[name], _ = features.pad([row[name] for row in rows], sizes.facts, none)
    return FactTexts(**arrays)


def _followed(instance: Instance, tokenizer: Tokenizer, sizes: AlignmentSettings) -> dict[str, list[Any]]:
    """Returns the fields of `FactTexts`, not padded.

    Each fact belongs to the clause that is its head, else to the whole turn; the facts of cut clauses are dropped.
    """
    turn, most = instance.context[-1], 1 + sizes.clauses
    texts = [turn, *clauses(turn)]
    places = {text.strip().lower(): place for place, text in reversed(list(enumerate(texts)))}
    feelings: list[list[int]] = [[] for _ in texts]
    about: list[tuple[int, int, list[int]]] = []
    for fact in sorted(facts_of(instance), key=lambda fact: fact.rank):
        of, ids = places.get(fact.head.strip().lower(), 0), tokenizer.encode(fact.tail)
        if fact.relation == FEELINGS:
            feelings[of] += ids
        elif fact.relation in COGNITION and of < most:
            about.append((of, COGNITION.index(fact.relation), [tokenizer.cls_id, *ids][: sizes.tail_tokens]))
    kept, words = about[: sizes.facts], tokenizer.encode_batch(texts[:most])
    return {
        "turns": [[tokenizer.cls_id, *features.keep_newest(ids, sizes.tokens - 1)] for ids in words],
        "feelings": [ids[: sizes.tokens] for ids in feelings[:most]],
        "tails": [ids for _, _, ids in kept],
        "of": [of for of, _, _ in kept],
        "relation": [relation for _, relation, _ in kept],
    }


def _related(instance: Instance, tokenizer: Tokenizer, most: int) -> list[list[int]]:
    """Returns [CLS] and the words of all tails for each relation of SOCIAL_RELATIONS; empty if it has no tail."""
    tails: dict[str, list[str]] = {name: [] for name in SOCIAL_RELATIONS}
    for fact in facts_of(instance):
        if fact.relation in tails:
            tails[fact.relation].append(fact.tail)
    words = [tokenizer.encode(" ".join(found)) for found in tails.values()]
    return [[tokenizer.cls_id, *ids][:most] if ids else [] for ids in words]


def _following(instances: Sequence[Instance]) -> list[str]:
    """Returns the speaker's turn after each response, taken from the dialogue's next instance; empty if none."""
    turns = {i.id: i.context[-1] for i in instances}
    places = (instance.id.rpartition("#") for instance in instances)
    return [turns.get(f"{dialogue}#{int(number) + 2}", "") for dialogue, _, number in places]
