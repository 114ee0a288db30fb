"""What the papers print, by row and under our metric names; percentages where ours are.

REG: Wang et al., Tables 1, 2, 3 and 5; its Acc is multiplied by 100. EmpRL: Ma et al., Tables II, VI and VII. A table
mixes sources and units: REG's perplexities are per word for LEMPEx and the word-level Transformers and per subword for
the rest, and rows are copied from other papers. Only rows of one system and its ablations are comparable with each
other.
"""

from __future__ import annotations

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

# Table 3, whose columns stand in another order (PPL, Dist-1, Dist-2, BLEU-1, BLEU-2, Acc).
REG_SIZES: dict[str, dict[str, float]] = {
    "T5-small": _row(17.14, 5.50, 21.01, 41.1, 17.04, 8.05),
    "T5-small + REG": _row(16.67, 5.79, 25.41, 47.8, 19.60, 11.12),
    "T5-large": _row(16.17, 5.56, 22.37, 43.7, 19.42, 9.83),
    "T5-large + REG": _row(14.89, 6.03, 26.02, 48.1, 19.84, 11.20),
    "T5-XL": _row(15.51, 5.78, 24.79, 48.7, 19.55, 10.91),
    "T5-XL + REG": _row(13.73, 6.51, 26.31, 48.9, 19.96, 11.28),
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

OTHER_CORPORA = {"dailydialog": ("EmpRL, Table VII", EMPRL_DAILYDIALOG)}
"""Corpora beside EmpatheticDialogues → the table of a paper about them."""

TABLES = {
    "REG, Table 1": (REG_PAPER, REG_ABLATIONS),
    "EmpRL, Table II": (EMPRL_PAPER, EMPRL_ABLATIONS),
}
"""Each paper's main table and its ablations."""

PAPER_OF = {"EmpRL": "EmpRL, Table II", **dict.fromkeys(REG_PAPER, "REG, Table 1")}
"""The rows that a run can stand beside → the table that they are in."""
