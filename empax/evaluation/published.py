"""What the papers print, by row and under our metric names; percentages where ours are.

REG: Wang et al., Tables 1, 2, 3 and 5; its Acc is multiplied by 100. EmpRL: Ma et al., Tables II, VI and VII. LEMPEx:
Majumder et al., Tables 2 and 5. ReflectDiffu: Yuan et al., Table 2. NEC: Huangfu et al., Tables 1, 3 and 4.
A table mixes sources and units: REG's perplexities are per word for LEMPEx and the word-level Transformers and per
subword for the rest, and rows are copied from other papers. Only rows of one system and its ablations are comparable
with each other.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from empax.core.types import MECHANISMS, Prediction

_COLUMNS = ("perplexity", "distinct_1", "distinct_2", "emotion_accuracy", "bleu_1", "bleu_2")


def _row(*values: float | None) -> dict[str, float]:
    return {name: value for name, value in zip(_COLUMNS, values, strict=True) if value is not None}


# Table 1: PPL, Dist-1, Dist-2, Acc, BLEU-1, BLEU-2.
REG_PAPER: dict[str, dict[str, float]] = {
    "Transformer": _row(37.65, 0.47, 2.05, None, 18.07, 8.34),
    "MIME": _row(37.33, 0.41, 1.62, 29.6, 18.60, 8.39),
    "KEMP": _row(37.32, 0.55, 2.31, 34.1, 18.19, 8.15),
    "CASE": _row(35.37, 0.74, 4.01, 40.2, 17.90, 8.69),
    "CAB": _row(35.06, 0.89, 2.95, 40.5, 20.23, 9.39),
    "IAMM": _row(34.82, 0.88, 3.05, 43.7, 19.51, 8.74),
    "ReflectDiffu": _row(24.56, 0.98, 4.35, 48.7, 23.59, 11.25),
    "REG": _row(24.62, 1.15, 5.12, 48.4, 23.88, 11.22),
    "LEMPEx": _row(26.37, 1.41, 14.66, None, 19.18, 8.46),
    "DialoGPT": _row(18.74, 2.71, 12.01, None, 18.69, 8.58),
    "BlenderBot": _row(16.71, 2.58, 16.20, 47.0, 19.79, 9.33),
    "EmpGPT-3": _row(None, 3.15, 18.63, None, 16.38, 7.67),
    "Exemplar": _row(16.83, 2.71, 22.25, None, 18.50, 9.65),
    "EmpCRL": _row(16.91, 4.33, 16.32, 41.1, 20.77, 9.85),
    "PECER": _row(16.79, 3.69, 16.83, None, 21.23, 10.14),
    "T5 + REG": _row(16.67, 5.79, 25.41, 47.8, 19.60, 11.12),
    "GPT-4o": _row(230.99, 1.79, 14.72, 24.4, 6.57, 2.68),
    "Llama-3.1-8B + SFT": _row(28.34, 0.88, 3.96, 20.3, 22.10, 10.45),
    "Llama-3.1-8B + SFT + CoT": _row(24.92, 0.92, 4.13, 21.1, 23.38, 11.29),
    "Llama-3.1-8B + REG": _row(19.55, 2.21, 8.44, 28.5, 24.10, 11.65),
}

# Table 2: the T5 backbone with one part less.
REG_ABLATIONS: dict[str, dict[str, float]] = {
    "T5 + REG": REG_PAPER["T5 + REG"],
    "w/o emotion attributes": _row(16.71, 5.62, 24.72, 31.0, 17.13, 8.55),
    "w/o BLEU": _row(16.96, 5.64, 23.91, 47.3, 16.77, 7.91),
    "w/o F1": _row(16.83, 5.61, 22.30, 47.1, 18.12, 10.61),
    "w/o ROUGE-L": _row(16.90, 5.81, 25.53, 46.9, 18.26, 9.10),
    "w/o candidate augmentation": _row(16.78, 5.51, 24.12, 45.1, 17.25, 9.04),
    "G1 + RAG": _row(16.94, 3.89, 18.11, 39.1, 17.10, 8.61),
    "from scratch": _row(16.93, 5.75, 25.01, 46.3, 18.50, 8.51),
}


def _emprl(*values: float | None) -> dict[str, float]:
    names = ("perplexity", "distinct_1", "distinct_2", "empathy_f1")
    return {name: value for name, value in zip(names, values, strict=True) if value is not None}


# Table II: PPL, Dist-1, Dist-2, Emp-F1.
EMPRL_PAPER: dict[str, dict[str, float]] = {
    "MoEL": _emprl(36.97, 0.44, 2.16, 59.31),
    "MIME": _emprl(37.36, 0.47, 2.02, 59.69),
    "EmpDG": _emprl(37.26, 0.49, 2.23, 58.54),
    "KEMP": _emprl(36.39, 0.61, 2.65, 54.29),
    "CEM": _emprl(36.12, 0.66, 2.99, 63.32),
    "SEEK": _emprl(37.25, 0.72, 3.11, 63.08),
    "CASE": _emprl(35.59, 0.78, 3.98, 64.72),
    "T5": _emprl(11.95, 4.01, 25.24, 65.70),
    "Llama3": _emprl(7.78, 4.77, 28.78, 67.74),
    "ChatGPT": _emprl(None, 4.22, 23.99, 64.79),
    "EmpRL": _emprl(12.90, 4.65, 29.03, 69.43),
}

# Table VI.
EMPRL_ABLATIONS: dict[str, dict[str, float]] = {
    "EmpRL": EMPRL_PAPER["EmpRL"],
    "w/o KL penalty": _emprl(14.49, 4.79, 29.88, 68.87),
    "w/o empathy reward": _emprl(12.10, 3.96, 25.13, 65.90),
    "w/o RL": _emprl(11.95, 4.01, 25.24, 65.70),
}


def _lempex(
    bleu: float, perplexity: float, distinct_1: float, distinct_2: float, *synthetic: float
) -> dict[str, float]:
    names = (*(f"{name}_f1:macro_binary" for name in MECHANISMS), "sentiment_mae")
    row = {"perplexity_per_word": perplexity, "bleu_2": bleu, "distinct_1": distinct_1, "distinct_2": distinct_2}
    return row | (dict(zip(names, synthetic, strict=True)) if synthetic else {})


# Table 2 (BLEU, PPL, Distinct-1, Distinct-2) with Table 5 (emotional presence, interpretation, exploration, MAE).
LEMPEX_PAPER: dict[str, dict[str, float]] = {
    "MIME": _lempex(8.76, 37.33, 0.63, 3.97, 51.74, 50.51, 56.47, 0.4484),
    "EmpDG": _lempex(8.61, 34.18, 1.81, 6.38, 55.29, 52.58, 52.40, 0.4526),
    "T5-PT": _lempex(7.47, 36.88, 1.59, 17.33),
    "LEMPEx": _lempex(7.88, 26.37, 1.41, 14.66, 61.67, 55.55, 65.08, 0.442),
}

LEMPEX_ABLATIONS: dict[str, dict[str, float]] = {
    "LEMPEx": LEMPEX_PAPER["LEMPEx"],
    "w/o empathetic losses": _lempex(7.49, 26.88, 1.39, 14.55, 59.74, 53.44, 61.33, 0.453),
    "w/o exemplars and losses (T5-GloVe)": _lempex(7.38, 25.26, 1.37, 13.72, 59.05, 52.27, 61.00, 0.464),
}


def _small_talk(bleu_1: float, bleu_2: float, rouge_l: float) -> dict[str, float]:
    return {"bleu_1": bleu_1, "bleu_2": bleu_2, "rouge_l": round(rouge_l / 100.0, 4)}


# Table VII: BLEU-1, BLEU-2, ROUGE-L, the last in percent there; its first three rows are CTRLStruct's.
EMPRL_DAILYDIALOG: dict[str, dict[str, float]] = {
    "Seq2Seq": _small_talk(30.90, 3.60, 4.90),
    "BART": _small_talk(36.40, 14.10, 7.50),
    "CTRLStruct": _small_talk(39.70, 15.70, 8.00),
    "T5": _small_talk(30.46, 18.66, 9.64),
    "Llama3": _small_talk(31.49, 19.78, 12.28),
    "ChatGPT": _small_talk(39.39, 24.59, 12.84),
    "EmpRL": _small_talk(28.76, 17.66, 9.21),
}


def _nec(*values: float | None) -> dict[str, float]:
    names = (
        "perplexity",
        "bleu_1",
        "bleu_2",
        "bleu_3",
        "bleu_4",
        "distinct_1",
        "distinct_2",
        "sentence_std",
        "top5_share",
    )
    return {name: value for name, value in zip(names, values, strict=True) if value is not None}


# Table 1: PPL, B-1 to B-4, Dist-1, Dist-2, Sent-Std; Table 3: the share of the five most frequent sentences. Baselines
# are copied but for the last two columns, which its authors computed; three of their labels are permuted (PAPERS.md).
# Its perplexity shrinks with the padding of a batch, its Dist leaves punctuation out, its BLEU keeps the case.
NEC_PAPER: dict[str, dict[str, float]] = {
    "Transformer": _nec(37.62, 18.07, 8.34, 4.57, 2.86, 0.36, 1.35, 47.35, 32.38),
    "Multi-TRS": _nec(37.50, 18.78, 8.55, 4.70, 2.95, 0.35, 1.27, 100.11, 46.61),
    "MoEL": _nec(36.60, 18.07, 8.30, 4.37, 2.65, 0.59, 2.64, 40.15, 25.97),
    "MIME": _nec(37.24, 18.60, 8.39, 4.54, 2.65, 0.47, 1.66, 216.08, 54.58),
    "EmpDG": _nec(37.43, 19.96, 9.11, 4.74, 2.80, 0.46, 1.99, 26.94, 29.94),
    "CEM": _nec(36.33, 16.12, 7.29, 4.06, 2.03, 0.62, 2.39, 61.26, 36.82),
    "DCKS": _nec(16.08, 21.73, 10.62, 6.24, 4.09, 2.19, 9.61, 36.89, 34.41),
    "NEC": _nec(12.89, 23.62, 12.14, 7.27, 4.78, 3.15, 13.91, 18.61, 20.32),
}

# Table 4.
NEC_ABLATIONS: dict[str, dict[str, float]] = {
    "NEC": NEC_PAPER["NEC"],
    "w/o Entity": _nec(12.71, 22.56, 11.57, 6.96, 4.61, 2.41, 10.11, 19.31, None),
    "w/o Social": _nec(12.63, 23.54, 12.15, 7.08, 4.57, 2.11, 8.02, 19.22, None),
    "w/o SelfGen": _nec(11.91, 23.01, 11.73, 6.84, 4.60, 2.15, 10.64, 20.33, None),
    "w/o HighFreq": _nec(11.81, 23.42, 12.01, 7.22, 4.69, 3.02, 12.06, 21.12, None),
    "w/o DiffEmo": _nec(12.97, 22.91, 11.66, 6.81, 4.62, 2.74, 11.51, 19.66, None),
}


def _reflect(*values: float) -> dict[str, float]:
    names = ("bleu_1", "bleu_2", "bleu_3", "bleu_4", "emotion_accuracy", "perplexity", "distinct_1", "distinct_2")
    return dict(zip((*names, "intent_accuracy"), values, strict=False))


# Table 2: BLEU-1 to BLEU-4, Acc_emo, PPL, Dist-1, Dist-2, and Acc_intent of the system and its ablations. BARTScore is
# left out: it is a transform that the paper does not give.
REFLECTDIFFU_PAPER: dict[str, dict[str, float]] = {
    "MTRS": _reflect(17.87, 8.51, 4.36, 2.61, 32.96, 37.98, 0.40, 1.57),
    "MoEL": _reflect(18.02, 8.67, 4.35, 2.73, 31.02, 36.81, 0.43, 1.76),
    "MIME": _reflect(19.82, 8.86, 4.43, 2.77, 30.26, 36.93, 0.51, 1.92),
    "EmpDG": _reflect(19.12, 8.91, 4.89, 2.85, 32.90, 37.55, 0.49, 1.65),
    "KEMP": _reflect(17.92, 8.54, 4.38, 2.71, 36.40, 36.59, 0.66, 2.43),
    "CASE": _reflect(19.66, 8.95, 4.92, 2.90, 38.96, 35.97, 0.70, 2.66),
    "CAB": _reflect(20.23, 9.39, 4.96, 3.01, 40.52, 35.06, 0.89, 2.95),
    "Qwen2-7B + CoT": _reflect(23.31, 11.21, 5.20, 3.45, 23.10, 25.45, 0.87, 3.87),
    "Llama-3.1-8B + CoT": _reflect(23.38, 11.29, 5.25, 3.47, 21.15, 24.92, 0.92, 4.13),
    "ReflectDiffu": _reflect(23.59, 11.25, 5.35, 3.62, 48.76, 24.56, 0.98, 4.35, 80.32),
}

REFLECTDIFFU_ABLATIONS: dict[str, dict[str, float]] = {
    "ReflectDiffu": REFLECTDIFFU_PAPER["ReflectDiffu"],
    "w/o ERA": _reflect(22.59, 10.66, 5.02, 3.28, 42.37, 24.78, 0.95, 4.27, 78.68),
    "w/o C-Experts": _reflect(23.13, 11.05, 5.06, 3.31, 39.44, 24.82, 0.91, 4.03, 77.44),
    "w/o Intent twice": _reflect(20.91, 9.86, 4.87, 3.16, 44.56, 29.25, 0.85, 3.97, 66.44),
    "w/o EMU": _reflect(21.95, 10.05, 4.96, 3.22, 48.35, 27.45, 0.69, 2.96, 79.24),
}

OTHER_CORPORA = {"dailydialog": ("EmpRL, Table VII", EMPRL_DAILYDIALOG)}
"""Corpora beside EmpatheticDialogues → the table of a paper about them."""

TABLES = {
    "REG, Table 1": (REG_PAPER, REG_ABLATIONS),
    "EmpRL, Table II": (EMPRL_PAPER, EMPRL_ABLATIONS),
    "LEMPEx, Tables 2 and 5": (LEMPEX_PAPER, LEMPEX_ABLATIONS),
    "ReflectDiffu, Table 2": (REFLECTDIFFU_PAPER, REFLECTDIFFU_ABLATIONS),
    "NEC, Tables 1 and 3": (NEC_PAPER, NEC_ABLATIONS),
}
"""Each paper's main table and its ablations."""

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
"""Table → metric → why a column of it must not be compared with ours; what is not here may be."""

PAPER_OF = {
    **dict.fromkeys(REG_PAPER, "REG, Table 1"),
    "EmpRL": "EmpRL, Table II",
    "LEMPEx": "LEMPEx, Tables 2 and 5",
    "ReflectDiffu": "ReflectDiffu, Table 2",
    "NEC": "NEC, Tables 1 and 3",
}
"""The rows that a run can stand beside → the table that they are in."""

CORPUS = "EmpatheticDialogues"
"""What the main tables of all papers are about: its whole test split."""

ARCHIVES = {
    "56f234d77b7dd1f005fd365bb17769cfe346c3c84295b69bc069c8ccb83be03d": "the official archive",
    "7e32806610c7c70e0a265f3f5e3c83a04ae70fe222f1c9c7726869c6fe009b48": "an archive rebuilt from a public copy",
}
"""SHA-256 of the archives of CORPUS that we know."""

KNOWN_ROWS = {
    "d68e2ca105b2cffb": ("of an archive rebuilt from a public copy", True),
    "c51368886ffdc9ee": ("of an archive rebuilt from a public copy, cut as MoEL's", True),
    "fa8c1e9352a73729": ("cleaned, as MoEL released them", True),
    "e19d82394deccd04": ("cleaned, as KEMP released them", True),
    "1997091f20bc6d68": ("cleaned, as EmpDG released them: contexts with a later turn", False),
    "338941b9e1a910d8": ("released with a t5-small", False),
}
"""`fingerprint` of rows of CORPUS's test split → which rows, and whether they are the whole split."""

_NAMES = {"empathetic_dialogues": CORPUS, "sample": "the built-in sample", "jsonl": "a corpus of the user's own"}


def fingerprint(rows: Sequence[Prediction]) -> str:
    """The same for the same contexts and references, in any order and with any blanks between words."""
    keys = sorted({" ".join(" ".join((*row.context, row.reference)).split()) for row in rows})
    return hashlib.sha256("\n".join(keys).encode(errors="replace")).hexdigest()[:16]


@dataclasses.dataclass(frozen=True)
class TestSet:
    """What was answered.

    Attributes:
      corpus: its name; empty = not known.
      split: of the corpus; empty = not known.
      rows: how many.
      whole: whether they are known to be the whole test split of CORPUS.
      about: more words about the rows; may be empty.
      fingerprint: of the rows.
    """

    __test__ = False  # no class of tests, whatever its name

    corpus: str
    split: str
    rows: int
    whole: bool
    about: str
    fingerprint: str

    @property
    def title(self) -> str:
        """For the head of a table."""
        where = ", ".join(filter(None, (self.corpus or "corpus not known", self.split and f"{self.split} split")))
        return f"{where}, {self.rows:,} rows" + (f" {self.about}" if self.about else "")

    @property
    def why_not(self) -> str:
        """Why published rows about CORPUS do not belong beside these; empty = they do."""
        if self.whole:
            return ""
        if self.corpus != CORPUS:
            found = self.corpus or "a corpus that is not known"
            return f"they are about the test split of {CORPUS}, these {self.rows:,} rows are of {found}"
        return f"they are about the whole test split of {CORPUS}, these are {self.rows:,} other rows of it"

    def as_json(self) -> dict[str, Any]:
        """Fields and title, for report.json."""
        return {**dataclasses.asdict(self), "title": self.title}


def identify(
    rows: Sequence[Prediction],
    *,
    data: Mapping[str, Any] | None = None,
    config: Mapping[str, Any] | None = None,
    stage: str = "",
) -> TestSet:
    """Which rows these are: by their texts where those are known, else by what a run says of its data.

    Args:
      rows: with contexts and references.
      data: `prepare/counts.json` of the run: the hash of the archive as `source_hash`, instances by split.
      config: of the run.
      stage: its evaluate stage.
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
