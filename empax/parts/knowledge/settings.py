"""Settings of the sources of facts."""

from __future__ import annotations

import dataclasses
from typing import Literal

from empax.core.config import ConfigError, check_numbers
from empax.interop.pretrained_encoders import EncoderSettings

Maker = Literal["file", "sample", "atomic", "wordnet", "comet", "llm"]

_ASKED = ("atomic", "comet", "llm")

MINILM = EncoderSettings(pretrained="minilm")


@dataclasses.dataclass(frozen=True)
class SourceSettings:
    """One source of facts.

    Attributes:
      source: "file" (JSON lines as in `data.knowledge`), "sample" (those of the built-in corpus), "atomic" (people's
        annotations of the ATOMIC event that is nearest to the last turn), "wordnet" (facts about the things in a
        context), "comet" (a model trained on ATOMIC) or "llm" (a prompted language model).
      path: for "file" a file, with "{split}" if there is one for each split; for "atomic" the folder of its files
        (empty = `config.data.dir`); for "wordnet" the folder of its database; for "comet" and "llm" the folder or the
        name of a model.
      tails: for "atomic", "wordnet" and "comet": maximum tails of a relation; for "comet" also its number of beams.
      clauses: for "atomic", "comet" and "llm": whether to query each sentence of the last turn too (CASE).
      entities: for "comet" queried about entities: the folder of WordNet, which finds the entities of a context.
      encoder: for "atomic": encoder that compares turns and events.
      batch_size: batch size of "comet" and "llm".
    """

    source: Maker = "atomic"
    path: str = ""
    tails: int = 5
    clauses: bool = False
    entities: str = ""
    encoder: EncoderSettings = MINILM
    batch_size: int = 32

    def __post_init__(self) -> None:
        check_numbers(self, "tails", "batch_size", least=1)
        if self.source not in ("sample", "atomic") and not self.path:
            raise ConfigError(f"source = {self.source!r} needs path: {_PATHS[self.source]}.")
        if self.clauses and self.source not in _ASKED:
            raise ConfigError(
                f"clauses = True: source = {self.source!r} queries no clauses, only {', '.join(_ASKED)} do."
            )


@dataclasses.dataclass(frozen=True)
class KnowledgeSettings:
    """Settings of stages of kind "knowledge".

    Attributes:
      social: source of facts about people; None = no such facts.
      entity: source of facts about things; None = no such facts.
      shuffled: whether dialogues exchange the tails of their facts: a control, named in reports.
    """

    social: SourceSettings | None = None
    entity: SourceSettings | None = None
    shuffled: bool = False

    def __post_init__(self) -> None:
        if self.social is None and self.entity is None:
            raise ConfigError("social = entity = None leaves nothing to find; set one of them, or leave the stage out.")


_PATHS = {
    "file": "a file of facts, or one for each split, as in 'facts/{split}.jsonl'",
    "wordnet": "the folder of WordNet's database files, such as /usr/share/wordnet",
    "comet": "the folder of a COMET, such as one that configs/comet_t5.py has trained",
    "llm": "a language model's folder, or 'smollm2'",
}
