r"""How good the tails of a COMET are on events that nobody learnt from, beside those of the nearest known event.

  python -m empax.parts.knowledge.quality --data=DATA --model=COMET [--events=200]

Both are asked for every relation of ATOMIC's test events that people completed. The first answer is scored against
all that people said: by BLEU-2 over the corpus of answers, and by how often it is one of theirs, letter case aside. The
last line is one JSON object.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from nltk.translate.bleu_score import SmoothingFunction, corpus_bleu

from empax.core.command import in_one_line, interruptible
from empax.data.batches import draw
from empax.data.knowledge import Fact
from empax.data.sources import LayoutSettings, PlainForm
from empax.decoding.settings import DecodeSettings
from empax.parts.knowledge import atomic
from empax.parts.knowledge.generated import load_writer
from empax.parts.knowledge.settings import MINILM, SourceSettings
from empax.parts.knowledge.sources import NearestEvent
from empax.parts.knowledge.vectors import TextEncoder


@dataclasses.dataclass(frozen=True)
class Question:
    """An event and a relation, with people's tails."""

    event: str
    relation: str
    tails: tuple[str, ...]


def questions(events: atomic.Events) -> list[Question]:
    """Returns all questions about `events` that people answered."""
    found: dict[tuple[str, str], list[str]] = {}
    for facts in events.values():
        for fact in facts:
            found.setdefault((fact.head, fact.relation), []).append(fact.tail)
    return [Question(event, relation, tuple(tails)) for (event, relation), tails in found.items()]


def scores(asked: Sequence[Question], answers: Sequence[str]) -> dict[str, float]:
    """Returns BLEU-2 (NLTK's, method 1) and exact match of the answers in percent; an empty text is no answer."""
    said = [answer.strip().lower() for answer in answers]
    known = [[tail.lower() for tail in question.tails] for question in asked]
    references = [[tail.split() for tail in tails] for tails in known]
    hypotheses = [answer.split() for answer in said]
    bleu: Any = corpus_bleu(references, hypotheses, weights=(0.5, 0.5), smoothing_function=SmoothingFunction().method1)
    hits = [answer in tails for answer, tails in zip(said, known, strict=True)]
    return {"bleu_2": 100.0 * float(bleu), "exact_match": 100.0 * sum(hits) / len(hits)}


def ask_comet(model: str, asked: Sequence[Question]) -> list[str]:
    """Returns the likeliest of five beams for each question."""
    writer = load_writer(SourceSettings("comet", model), DecodeSettings("beam", 24, num_beams=5))
    form = PlainForm(writer.tokenizer, LayoutSettings())
    prompts = form.encode([atomic.prompt(q.event, q.relation) for q in asked], max_tokens=256)
    return [answers[0][0] for answers in writer(prompts, progress="COMET")]


def ask_nearest(known: Mapping[str, Sequence[Fact]], encoder: TextEncoder, asked: Sequence[Question]) -> list[str]:
    """Returns the nearest event's first tail of each question's relation; empty if it has none."""
    source = NearestEvent(known, encoder, tails=1)
    names = list(known)
    places = source.nearest([atomic.spoken(question.event) for question in asked])
    answers = []
    for question, (place, _) in zip(asked, places, strict=True):
        tails = [fact.tail for fact in known[names[place]] if fact.relation == question.relation]
        answers.append(tails[0] if tails else "")
    return answers


@in_one_line
def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 0, or 2 for an error that the user can correct."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, help="the folder of ATOMIC's files, or the one that holds knowledge/")
    parser.add_argument("--model", required=True, help="a COMET's folder")
    parser.add_argument("--events", type=int, default=0, help="how many test events to draw, 0 for all")
    options = parser.parse_args(arguments)
    known = atomic.read_events(atomic.find_files(options.data, ("trn", "dev")))
    held_out = atomic.read_events(atomic.find_files(options.data, ("tst",)))
    events = draw([event for event in held_out if event not in known], options.events)
    asked = questions({event: held_out[event] for event in events})
    found = {
        "comet": scores(asked, ask_comet(options.model, asked)),
        "nearest_event": scores(asked, ask_nearest(known, TextEncoder.of(MINILM, None, 0), asked)),
        "events": len(events),
        "questions": len(asked),
    }
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    with interruptible():
        sys.exit(main())
