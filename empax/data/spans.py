"""Emotion-cause spans, the speaker's words that explain their emotion, and the positions of tokens in turns.

A span is a character range of one turn of a context. Spans come from annotators (RECCON, the built-in sample, a file),
or from a sentiment lexicon (VADER), which marks words of emotion instead of causes.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int

from empax.core.config import ConfigError
from empax.core.files import DataError, read_jsonl
from empax.core.inputs import note
from empax.core.protocols import Tokenizer
from empax.core.text_files import read_json
from empax.core.types import Instance
from empax.data import sample
from empax.data.corpora import find_corpus
from empax.data.english import vader_lexicon, written
from empax.data.features import keep_newest

RECCON_SPLITS = {"train": "train", "validation": "valid", "test": "test"}
_FOLDER = "emotion_causes"
_WORD = re.compile(r"\w+(?:['’]\w+)*")


class Span(NamedTuple):
    """Characters `start` to `end` (exclusive) of the turn with the number `turn`, from 0."""

    turn: int
    start: int
    end: int


@dataclasses.dataclass(frozen=True)
class SpanExample:
    """A context that ends with a turn of the speaker, with the spans in the speaker's turns."""

    id: str
    context: tuple[str, ...]
    spans: tuple[Span, ...]


def is_speakers(turn: int, num_turns: int) -> bool:
    """Whether a turn of a context is the speaker's: turns alternate, and the last is the speaker's."""
    return (num_turns - 1 - turn) % 2 == 0


def read_spans(path: Path, instances: Iterable[Instance], *, some: bool = False) -> list[SpanExample]:
    """Reads the instances with spans in a file. A line is {"id", "turn", "start", "end"}, in characters of the turn.

    The characters are those of the instance, in which several blanks may have become one
    (`empathetic_dialogues.read_dialogues`).

    `some`: whether `instances` are a part of the corpus; spans in others are then left out.

    Raises DataError if a line has another form, an id has no instance, or a span is not within a speaker's turn.
    """
    by_id = {instance.id: instance for instance in instances}
    found: dict[str, list[Span]] = {}
    for number, row in enumerate(read_jsonl(path), start=1):
        where = f"{path}, row {number}"
        if set(row) != {"id", "turn", "start", "end"}:
            raise DataError(f"{where}: a span has the fields id, turn, start, end; found {', '.join(row) or 'none'}.")
        if some and isinstance(row["id"], str) and row["id"] not in by_id:
            continue
        if not isinstance(row["id"], str) or row["id"] not in by_id:
            raise DataError(f"{where}: there is no instance {row['id']!r}; spans must be in the run's own instances.")
        if not all(type(row[name]) is int for name in ("turn", "start", "end")):
            raise DataError(f"{where}: turn, start and end must be whole numbers.")
        span, context = Span(row["turn"], row["start"], row["end"]), by_id[row["id"]].context
        _check(span, context, where)
        found.setdefault(row["id"], []).append(span)
    return [SpanExample(name, by_id[name].context, tuple(sorted(spans))) for name, spans in found.items()]


def _check(span: Span, context: Sequence[str], where: str) -> None:
    if not 0 <= span.turn < len(context) or not 0 <= span.start < span.end <= len(context[span.turn]):
        raise DataError(f"{where}: {span} is not within a context of {len(context)} turns.")
    if not is_speakers(span.turn, len(context)):
        raise DataError(f"{where}: turn {span.turn} is the listener's; reasons are in the speaker's turns.")


def lexicon_spans(context: Sequence[str], least_valence: float = 1.5) -> tuple[Span, ...]:
    """Finds words of the speaker's turns whose absolute valence in VADER's lexicon is at least `least_valence` (of 4).

    Source: Hutto and Gilbert 2014. These are words of emotion, not causes.
    """
    lexicon, spans = vader_lexicon(), []
    for turn, text in enumerate(context):
        if is_speakers(turn, len(context)):
            hits = (m for m in _WORD.finditer(text) if abs(lexicon.get(m[0].lower(), 0.0)) >= least_valence)
            spans += [Span(turn, *hit.span()) for hit in hits]
    return tuple(spans)


def lexicon_examples(instances: Iterable[Instance]) -> list[SpanExample]:
    """Returns every instance with `lexicon_spans`."""
    return [SpanExample(i.id, i.context, lexicon_spans(i.context)) for i in instances]


def sample_examples(split: str) -> list[SpanExample]:
    """Returns turns of the built-in corpus with causes marked by annotators: 32 in "train", 32 in "test"."""
    turns = {d.id: tuple(u.text for u in d.utterances) for d in sample.load_dialogues()[split]}
    found = []
    for dialogue, turn, texts in sample.load_cause_texts():
        if dialogue in turns:
            context = turns[dialogue][: turn + 1]
            places = [context[turn].index(text) for text in texts]
            spans = (Span(turn, place, place + len(text)) for place, text in zip(places, texts, strict=True))
            found.append(SpanExample(f"{dialogue}#{turn + 2}", context, tuple(sorted(spans))))
    return found


def find_causes(data_dir: str | os.PathLike[str] = "") -> Path:
    """Finds the folder `emotion_causes` in `data_dir` (else EMPAX_DATA_DIR), or that folder itself.

    Raises ConfigError if no folder is named, or it does not hold RECCON's files.
    """
    place = find_corpus("RECCON", ["reccon_dailydialog_train.json"], _FOLDER, data_dir)
    # A folder other than RECCON's own holds other corpora too.
    note("RECCON", place, None if place.name == _FOLDER else place.glob("reccon_dailydialog_*.json"))
    return place


def read_reccon(path: Path) -> list[SpanExample]:
    """Reads RECCON's emotional turns, each the last of its context, with the causes in the same person's turns.

    Texts are detokenised (`english.written`). Causes in the other person's turns, or outside the dialogue, are left
    out; an emotional turn with no other cause is an example without a span. Source: Poria et al. 2021, RECCON-DD.
    Raises DataError if the file has another form.
    """
    content, examples = read_json(path), []
    try:
        for name, (turns,) in content.items():
            texts = [written(turn["utterance"]) for turn in turns]
            for last, turn in enumerate(turns):
                if turn["emotion"] == "neutral":
                    continue
                own = zip(
                    turn.get("expanded emotion cause evidence", ()),
                    turn.get("expanded emotion cause span", ()),
                    strict=True,
                )
                spans = (_reccon_span(texts[: last + 1], number, written(text)) for number, text in own)
                kept = tuple(sorted({span for span in spans if span is not None}))
                examples.append(SpanExample(f"{name}#{last + 1}", tuple(texts[: last + 1]), kept))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise DataError(f"{path} is not a RECCON file as released ({type(error).__name__}: {error}).") from error
    return examples


def _reccon_span(context: Sequence[str], number: Any, text: str) -> Span | None:
    """Returns the span of a cause in the turn `number`, from 1; None if it is not in a turn of the speaker."""
    if not isinstance(number, int) or not 1 <= number <= len(context) or not text:
        return None
    start = context[number - 1].find(text)
    if start < 0 or not is_speakers(number - 1, len(context)):
        return None
    return Span(number - 1, start, start + len(text))


def read_cause_turns(path: Path) -> dict[str, tuple[int, ...]]:
    """Reads cause turns of EmpatheticDialogues by dialogue, from 0, found by a detector trained on RECCON.

    Source: Gao et al. 2021, released annotations. Raises DataError if a line has another form.
    """
    found = {}
    for number, row in enumerate(read_jsonl(path), start=1):
        causes = row.get("emotion_cause")
        named = isinstance(row.get("conv_id"), str)
        if not named or not isinstance(causes, list) or not all(type(turn) is int for turn in causes):
            raise DataError(f"{path}, row {number}: it must have conv_id and emotion_cause, a list of turns.")
        found[row["conv_id"]] = tuple(causes)
    return found


@dataclasses.dataclass(frozen=True)
class PlacedRow:
    """Ids of a context, at least one, with the position of each in it; turn -1 for ids without text (frames, roles)."""

    ids: list[int]
    places: list[Span]

    def texts(self, context: Sequence[str]) -> list[str]:
        """Returns the text of each id, in lower case; empty for ids without text."""
        return [context[p.turn][p.start : p.end].lower() if p.turn >= 0 else "" for p in self.places]

    def labels(self, spans: Iterable[Span]) -> list[int]:
        """Returns 1 for each id with a character in a span, else 0."""
        spans = tuple(spans)
        return [int(any(p.turn == s.turn and p.start < s.end and s.start < p.end for s in spans)) for p in self.places]

    def told(self, num_turns: int) -> list[bool]:
        """Returns whether each id belongs to the speaker's words, in a context of `num_turns` turns."""
        return [place.turn >= 0 and is_speakers(place.turn, num_turns) for place in self.places]

    def spans(self, labels: Iterable[int]) -> tuple[Span, ...]:
        """Returns the spans of ids labelled 1; adjacent ids in one turn form one span."""
        found: list[Span] = []
        open_turn = -1
        for place, label in zip(self.places, labels, strict=False):
            if not label or place.turn < 0:
                open_turn = -1
                continue
            if place.turn == open_turn:
                found[-1] = found[-1]._replace(end=place.end)
            else:
                found.append(place)
            open_turn = place.turn
        return tuple(found)

    def aligned_with(self, other: PlacedRow) -> Int[np.ndarray, " N"]:
        """Returns, for each id, the index of the first id of `other` that shares a character with it; -1 = none."""
        first: dict[tuple[int, int], int] = {}
        for number, place in enumerate(other.places):
            for character in range(place.start, place.end):
                first.setdefault((place.turn, character), number)
        found = []
        for place in self.places:
            at = ((place.turn, character) for character in range(place.start, place.end))
            found.append(next((first[key] for key in at if place.turn >= 0 and key in first), -1))
        return np.array(found, np.int32)


_NO_TEXT = Span(-1, 0, 0)


def place_contexts(
    tokenizer: Tokenizer,
    contexts: Sequence[Sequence[str]],
    *,
    max_tokens: int,
    first: int,
    roles: tuple[int, int] | None = None,
    behind: int | None = None,
) -> list[PlacedRow]:
    """Encodes each context's turns with their positions, truncated to `max_tokens` on the left (`keep_newest`).

    The id `first` comes before all turns and is never cut; the ids of speaker and listener (`roles`) precede their
    turns, and `behind` follows every turn.
    """
    if max_tokens < 2:
        raise ConfigError(f"max_tokens = {max_tokens} must be at least 2.")
    turns = list(dict.fromkeys(turn for context in contexts for turn in context))
    encoded = dict(zip(turns, tokenizer.encode_with_places(turns), strict=True))
    rows = []
    for context in contexts:
        placed: list[tuple[int, Span]] = []
        for turn, text in enumerate(context):
            if roles is not None:
                placed.append((roles[0 if is_speakers(turn, len(context)) else 1], _NO_TEXT))
            placed += [(i, Span(turn, *offset)) for i, offset in zip(*encoded[text], strict=True)]
            if behind is not None:
                placed.append((behind, _NO_TEXT))
        ids = keep_newest([i for i, _ in placed], max_tokens - 1, roles or ())
        places = [place for _, place in placed[len(placed) - len(ids) :]]
        if roles is not None and ids[0] in roles:
            places[0] = _NO_TEXT
        rows.append(PlacedRow([first, *ids], [_NO_TEXT, *places]))
    return rows


def marked(context: Sequence[str], spans: Iterable[Span]) -> list[str]:
    """Puts the spans of the turns between `<em>` and `</em>`, for human readers."""
    turns = list(context)
    for turn, start, end in sorted(spans, reverse=True):
        text = turns[turn]
        turns[turn] = f"{text[:start]}<em>{text[start:end]}</em>{text[end:]}"
    return turns


def span_counts(
    gold: Sequence[Sequence[int]], found: Sequence[Sequence[int]]
) -> tuple[Int[np.ndarray, " 3"], Int[np.ndarray, " 3"]]:
    """Counts (true positives, predicted, gold) of labels 1, and of maximal runs of them, which must match exactly."""

    def runs(labels: Sequence[int]) -> set[tuple[int, int]]:
        padded = np.diff(np.concatenate([[0], np.asarray(labels, int), [0]]))
        return set(zip(np.flatnonzero(padded == 1).tolist(), np.flatnonzero(padded == -1).tolist(), strict=True))

    tokens, spans = np.zeros(3, np.int64), np.zeros(3, np.int64)
    for wanted, given in zip(gold, found, strict=True):
        wanted_array, given_array = np.asarray(wanted), np.asarray(given)
        tokens += [(wanted_array & given_array).sum(), given_array.sum(), wanted_array.sum()]
        wanted_runs, given_runs = runs(wanted), runs(given)
        spans += [len(wanted_runs & given_runs), len(given_runs), len(wanted_runs)]
    return tokens, spans


def f1(counts: Sequence[int] | np.ndarray) -> float:
    """Returns the F1 in percent of (true positives, predicted, gold); 0 if nothing is predicted or gold."""
    true, predicted, gold = (int(count) for count in counts)
    return 200.0 * true / max(predicted + gold, 1)
