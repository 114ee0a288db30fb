"""Random-access examples of word-level contexts, and the emotion lexicon."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
from jaxtyping import Bool

from empax.core.config import ConfigError
from empax.core.inputs import note
from empax.core.paths import expand
from empax.core.protocols import Tokenizer
from empax.core.text_files import read_lines
from empax.core.types import Instance
from empax.data import features
from empax.data.english import vader_lexicon
from empax.data.exemplars import LabelledExamples, newest, padded
from empax.data.knowledge import SOCIAL_RELATIONS, clauses, facts_of
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
      emotions: the emotion to prepend to each instance's context; None = none.
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
        self.settings, self.emotional, self.picker = settings, emotional, picker
        turns = list(dict.fromkeys(turn for i in instances for turn in i.context))
        ids = dict(zip(turns, tokenizer.encode_batch(turns), strict=True))
        roles = [tokenizer.token_id(token) for token in (SPEAKER_TOKEN, LISTENER_TOKEN)]
        before = [[tokenizer.cls_id] for _ in instances]
        if emotions is not None:
            before = [[*row, *tokenizer.encode(emotion)] for row, emotion in zip(before, emotions, strict=True)]
        self.sources, self.speakers = [], []
        for instance, first in zip(instances, before, strict=True):
            words = [word for turn in instance.context for word in ids[turn]]
            last = len(instance.context) - 1
            said = [roles[(last - n) % 2] for n, turn in enumerate(instance.context) for _ in ids[turn]]
            room = settings.max_context_tokens - len(first)
            self.sources.append([*first, *features.keep_newest(words, room)])
            self.speakers.append([*[first[0]] * len(first), *features.keep_newest(said, room)])
        responses = tokenizer.encode_batch([i.response for i in instances])
        super().__init__(instances, responses, tokenizer, max_target_tokens or settings.max_target_tokens)
        self.feedback: list[list[int]] | None = None
        if train and settings.adversary is not None:
            following = tokenizer.encode_batch(_following(instances))
            self.feedback = [row[: settings.max_target_tokens] for row in following]
        if "refinement" in settings.readers:
            self.facts = [_related(i, tokenizer, settings.facts_tokens) for i in instances]
        if "alignment" in settings.readers:
            self.cognition = [_followed(i, tokenizer, settings.alignment) for i in instances]
        if picker is not None:
            self.concepts = [picker(words, facts_of(i)) for words, i in zip(self.sources, instances, strict=True)]
        self.lengths = np.array([[len(s), len(t)] for s, t in zip(self.sources, self.targets, strict=True)])

    def collate(self, indices: np.ndarray, length: int, rng: np.random.Generator) -> ClassicBatch:
        """Collates rows (-1 = filler) into numpy arrays; does not use `rng`."""
        del rng
        rows, settings = [int(i) for i in indices], self.settings
        arrays: dict[str, Any] = self.columns(rows, newest(self.sources, rows, length, self.pad_id))
        arrays["speaker"] = newest(self.speakers, rows, length, self.pad_id)[0]
        arrays["emotional"] = self.emotional[arrays["source"]] & arrays["source_mask"]
        if self.feedback is not None:
            found = padded(self.feedback, rows, settings.max_target_tokens, self.pad_id)
            arrays["feedback"], arrays["feedback_mask"] = found
        if "refinement" in settings.readers:
            nothing: list[list[int]] = [[]] * len(SOCIAL_RELATIONS)
            facts = [ids for i in rows for ids in (self.facts[i] if i >= 0 else nothing)]
            shape = len(rows), len(SOCIAL_RELATIONS), settings.facts_tokens
            ids, mask = features.pad(facts, settings.facts_tokens, self.pad_id)
            arrays["facts"], arrays["facts_mask"] = ids.reshape(shape), mask.reshape(shape)
        if "alignment" in settings.readers:
            arrays["cognition"] = self._cognition(rows, settings.alignment)
        if self.picker is not None:
            arrays["intensity"] = self.picker.intensities[arrays["source"]] * arrays["source_mask"]
            arrays["concepts"] = self._concepts(rows, length, self.picker) if self.picker.settings.most else None
        return ClassicBatch(**arrays)

    def _cognition(self, rows: Sequence[int], sizes: AlignmentSettings) -> FactTexts:
        nothing: Followed = ([], [], [])
        found = [self.cognition[i] if i >= 0 else nothing for i in rows]
        arrays: dict[str, Any] = {}
        texts = {
            "turns": ([turns for turns, _, _ in found], 1 + sizes.clauses, sizes.tokens),
            "feelings": ([feelings for _, feelings, _ in found], 1 + sizes.clauses, sizes.tokens),
            "tails": ([[ids for _, _, ids in tails] for _, _, tails in found], sizes.facts, sizes.tail_tokens),
        }
        for name, (texts_of, most, length) in texts.items():
            flat = [ids for row in texts_of for ids in [*row, *[[]] * (most - len(row))]]
            ids, mask = features.pad(flat, length, self.pad_id)
            arrays[name], arrays[f"{name}_mask"] = (x.reshape(len(rows), most, length) for x in (ids, mask))
        tails = [tails for *_, tails in found]
        arrays["of"], _ = features.pad([[of for of, *_ in row] for row in tails], sizes.facts, -1)
        arrays["relation"], _ = features.pad([[relation for _, relation, _ in row] for row in tails], sizes.facts, 0)
        return FactTexts(**arrays)

    def _concepts(self, rows: Sequence[int], length: int, picker: ConceptPicker) -> ConceptWords:
        """Returns the concepts of the words that `newest` kept."""
        cuts = [max(len(self.sources[i]) - length, 0) for i in rows]
        kept = [
            [(word, place - cut) for word, place in self.concepts[i] if place > cut] if i >= 0 else []
            for i, cut in zip(rows, cuts, strict=True)
        ]
        most = picker.settings.most
        words, mask = features.pad([[word for word, _ in row] for row in kept], most, self.pad_id)
        place, _ = features.pad([[place for _, place in row] for row in kept], most, -1)
        arrays: Any = words, mask, place, picker.intensities[words] * mask
        return ConceptWords(*arrays)


Followed: TypeAlias = tuple[list[list[int]], list[list[int]], list[tuple[int, int, list[int]]]]
"""Tokens of the turn and its clauses, of the feelings of each, and of the facts, each with its text and relation."""


def _followed(instance: Instance, tokenizer: Tokenizer, sizes: AlignmentSettings) -> Followed:
    """Assigns each fact to the clause that is its head, else to the whole turn; drops the facts of cut clauses."""
    last = instance.context[-1]
    first, cut = clauses(last)[: sizes.clauses], clauses(last)[sizes.clauses :]
    texts, unread = [last, *first], {text.strip().lower() for text in cut}
    places = {text.strip().lower(): place for place, text in reversed(list(enumerate(texts)))}
    feelings: list[list[int]] = [[] for _ in texts]
    tails = []
    for fact in sorted(facts_of(instance), key=lambda fact: fact.rank):
        head = fact.head.strip().lower()
        if head in unread and head not in places:
            continue
        of, ids = places.get(head, 0), tokenizer.encode(fact.tail)
        if fact.relation == FEELINGS:
            feelings[of] += ids
        elif fact.relation in COGNITION:
            tails.append((of, COGNITION.index(fact.relation), [tokenizer.cls_id, *ids][: sizes.tail_tokens]))
    turns = [[tokenizer.cls_id, *features.keep_newest(ids, sizes.tokens - 1)] for ids in tokenizer.encode_batch(texts)]
    return turns, [ids[: sizes.tokens] for ids in feelings], tails[: sizes.facts]


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


def emotional_words(name: str, tokenizer: Tokenizer) -> Bool[np.ndarray, " V"]:
    """Returns a mask of the ids that are words of the lexicon `name`, "vader" or a file with one word on each line.

    Departure: EmpDG takes the NRC lexicon, whose terms are not free. Raises ConfigError if there is no such file or it
    has none of the words, and DataError if it is not text.
    """
    words = _lexicon(name)
    found = np.array([tokenizer.decode([i]).strip() in words for i in range(tokenizer.vocab_size)])
    if not found.any():
        raise ConfigError(f"lexicon = {name!r} has none of the {tokenizer.vocab_size} words; give another.")
    return found


def check_lexicon(name: str) -> None:
    """Raises ConfigError if the lexicon does not exist."""
    if name == "vader":
        return
    if not expand(name).is_file():
        raise ConfigError(f'lexicon = {name!r} is not a file; give one with a word on each line, or "vader".')
    note(f"the lexicon {name!r}", expand(name))


@functools.cache
def _lexicon(name: str) -> frozenset[str]:
    check_lexicon(name)
    if name == "vader":
        return frozenset(vader_lexicon())
    return frozenset(line.strip().lower() for _, line in read_lines(expand(name))) - {""}
