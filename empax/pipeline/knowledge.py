"""Stage "knowledge": adds facts to every instance, from one source about people and one about things.

Each instance gets the notes `facts` and `source`, in STAGE/SPLIT.jsonl in the format of `data.knowledge`. Sources read
contexts alone: no gold response reaches a fact. With `shuffled`, every fact gets the tail of another dialogue's, a
control for the value of knowledge.
"""

from __future__ import annotations

import logging
from typing import Any

from empax.core.files import write_json, write_jsonl
from empax.core.system import RunContext
from empax.data import own
from empax.data.knowledge import describe
from empax.data.store import check_prepared, check_sole, prepared_instances
from empax.parts.knowledge.finder import Finder, check_finder
from empax.parts.knowledge.settings import KnowledgeSettings

log = logging.getLogger("empax")

Settings = KnowledgeSettings


def check(settings: Settings, run: RunContext) -> None:
    """Checks that the sources exist, and that no other stage finds facts; see `sources.check_source`, `check_sole`."""
    check_prepared(run)
    check_sole(run)
    check_finder(settings, run)


def run(settings: Settings, run: RunContext) -> None:
    finder = Finder.of(settings, run)
    source = finder.name
    about: dict[str, Any] = {"source": source}
    for split in own.SPLITS:
        instances = prepared_instances(run, split)
        rows, dropped = finder(instances, split)
        lines = (
            {"id": instance.id, "facts": [fact.row() for fact in facts], "source": source}
            for instance, facts in zip(instances, rows, strict=True)
        )
        write_jsonl(run.files.notes(run.stage, split), lines)
        counts = {**describe(rows), "dropped": dropped}
        log.info("%s: %d facts; %.1f%% of instances have some", split, counts["facts"], 100 * counts["with_facts"])
        about[split] = counts
    write_json(run.directory / "knowledge.json", about)
