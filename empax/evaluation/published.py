"""Published results by row, under our metric names and units. Sources: published.json.

Tables mix sources and units: REG's perplexities are per word for LEMPEx and the word-level Transformers and per subword
for the rest, and some rows are copied from other papers. Only rows of one system and its ablations are comparable with
each other.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from empax.core.files import read_json
from empax.core.types import MECHANISMS, Prediction

Table = dict[str, dict[str, float]]
"""Row → metric → value."""


def _read(path: Path) -> dict[str, tuple[Table, Table]]:
    """Reads the rows of each paper's table and its ablations, without missing values."""

    def rows(columns: list[str], of: Mapping[str, list[float | None]]) -> Table:
        pairs = {name: zip(columns, values, strict=True) for name, values in of.items()}
        return {name: {metric: v for metric, v in both if v is not None} for name, both in pairs.items()}

    tables = read_json(path).items()
    return {name: (rows(t["columns"], t["rows"]), rows(t["columns"], t["ablations"])) for name, t in tables}


TABLES = _read(Path(__file__).with_name("published.json"))
"""Each paper's main table and its ablations."""

OTHER_CORPORA = {"dailydialog": ("EmpRL, Table VII", TABLES.pop("EmpRL, Table VII")[0])}
"""Corpora other than EmpatheticDialogues → a paper's table on them."""

REG_PAPER = TABLES["REG, Table 1"][0]

_OTHER_JUDGES = "by the authors' T5-base classifiers, which their code trains on two classes"

NOT_COMPARABLE: dict[str, dict[str, str]] = {
    "LEMPEx, Tables 2 and 5": {
        "perplexity_per_word": "over a vocabulary of 21,132 words with the rest as one unknown, a start token counted",
        "bleu_2": "of an order that is not stated, lower-cased replies against references with capitals",
        **{f"{name}_f1:macro_binary": _OTHER_JUDGES for name in MECHANISMS},
    },
    "NEC, Tables 1 and 3": {
        "perplexity": "padding is counted, and its correction is inverted",
        **{f"bleu_{n}": "with capitals; parameters were chosen on the test split" for n in range(1, 5)},
        **{f"distinct_{n}": "without commas, full stops, question and exclamation marks" for n in (1, 2)},
    },
    "ReflectDiffu, Table 2": {
        "perplexity": "over a vocabulary that is not given; the same backbone has 35 to 38 in the rows beside it",
        "intent_accuracy": "of intents that a language model labelled and that were not released",
    },
}
"""Table → metric → why its column is not comparable with ours; other columns are."""

PAPER_OF = {
    **dict.fromkeys(REG_PAPER, "REG, Table 1"),
    "EmpRL": "EmpRL, Table II",
    "LEMPEx": "LEMPEx, Tables 2 and 5",
    "ReflectDiffu": "ReflectDiffu, Table 2",
    "NEC": "NEC, Tables 1 and 3",
}
"""Rows comparable with a run → their table."""

CORPUS = "EmpatheticDialogues"
"""The corpus of the main tables of all papers: its whole test split."""

ARCHIVES = {
    "56f234d77b7dd1f005fd365bb17769cfe346c3c84295b69bc069c8ccb83be03d": "the official archive",
    "7e32806610c7c70e0a265f3f5e3c83a04ae70fe222f1c9c7726869c6fe009b48": "an archive rebuilt from a public copy",
}
"""SHA-256 of the known archives of CORPUS."""

KNOWN_ROWS = {
    "d68e2ca105b2cffb": ("of an archive rebuilt from a public copy", True),
    "c51368886ffdc9ee": ("of an archive rebuilt from a public copy, cut as MoEL's", True),
    "fa8c1e9352a73729": ("cleaned, as MoEL released them", True),
    "e19d82394deccd04": ("cleaned, as KEMP released them", True),
    "1997091f20bc6d68": ("cleaned, as EmpDG released them: contexts with a later turn", False),
    "338941b9e1a910d8": ("released with a t5-small", False),
}
"""`fingerprint` of rows of CORPUS's test split → description of the rows, and whether they are the whole split."""

_NAMES = {"empathetic_dialogues": CORPUS, "sample": "the built-in sample", "jsonl": "a corpus of the user's own"}


def fingerprint(rows: Sequence[Prediction]) -> str:
    """Returns a hash of contexts and references that ignores their order and the blanks between words."""
    keys = sorted({" ".join(" ".join((*row.context, row.reference)).split()) for row in rows})
    return hashlib.sha256("\n".join(keys).encode(errors="replace")).hexdigest()[:16]


@dataclasses.dataclass(frozen=True)
class TestSet:
    """A number of rows of a corpus and split, which are empty if unknown, and a further description of the rows.

    `whole`: whether they are known to be the whole test split of CORPUS.
    """

    __test__ = False  # not a class of tests, despite its name

    corpus: str
    split: str
    rows: int
    whole: bool
    about: str
    fingerprint: str

    @property
    def title(self) -> str:
        """A title for the header of a table."""
        where = ", ".join(filter(None, (self.corpus or "corpus not known", self.split and f"{self.split} split")))
        return f"{where}, {self.rows:,} rows" + (f" {self.about}" if self.about else "")

    @property
    def why_not(self) -> str:
        """Returns why published rows on CORPUS are not comparable with these; empty = they are."""
        if self.whole:
            return ""
        if self.corpus != CORPUS:
            found = self.corpus or "a corpus that is not known"
            return f"they are about the test split of {CORPUS}, these {self.rows:,} rows are of {found}"
        return f"they are about the whole test split of {CORPUS}, these are {self.rows:,} other rows of it"

    def as_json(self) -> dict[str, Any]:
        """Returns fields and title for report.json."""
        return {**dataclasses.asdict(self), "title": self.title}


def identify(
    rows: Sequence[Prediction],
    *,
    data: Mapping[str, Any] | None = None,
    config: Mapping[str, Any] | None = None,
    stage: str = "",
) -> TestSet:
    """Identifies the test set by its texts if they are known, else by a run's information on its data.

    `data` is `prepare/counts.json` of the run (the hash of the archive as `source_hash`, instances by split), `stage`
    its evaluate stage.
    """
    found = fingerprint(rows)
    if found in KNOWN_ROWS:
        about, whole = KNOWN_ROWS[found]
        return TestSet(CORPUS, "test", len(rows), whole, about, found)
    data, config = data or {}, config or {}
    settings = config.get("data", {})
    name, split = str(settings.get("name", "")), config.get(stage, {}).get("split", "test") if stage else ""
    archive = ARCHIVES.get(data.get("source_hash", ""), "")
    whole = (
        bool(archive)
        and split == "test"
        and not settings.get("limit")
        and len(rows) == data.get("test", {}).get("instances")
    )
    return TestSet(_NAMES.get(name, name), split, len(rows), whole, f"of {archive}" if archive else "", found)
