"""A judge of another family than the neural ones: TF-IDF and logistic regression, on the reply alone.

It shares no architecture, no start and no subwords with `identifier` and `classifier`, so that their common mistakes
are not its own. Source: ours.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float

from empax.core.types import LEVELS, MECHANISMS
from empax.data.epitome import EpitomePair, find_epitome, load_epitome, split_by_seeker
from empax.evaluation.empathy import cohens_kappa, f1

_MIN_DOCUMENTS = 2  # of a term
_INVERSE_PENALTY = 10.0  # chosen among 1, 4, 10 and 30 within the posts that `held_out` is not measured on


@dataclasses.dataclass(frozen=True)
class LinearJudge:
    """Levels of the mechanisms in replies.

    Attributes:
      words: scikit-learn's TF-IDF.
      models: a logistic regression for each mechanism.
      held_out: by mechanism `weighted_f1`, `macro_f1` (percent), `kappa` and `pairs`, on a fifth of the seekers' posts,
        by a judge of the same settings that has not seen them.
    """

    words: Any
    models: Mapping[str, Any]
    held_out: Mapping[str, Mapping[str, float]] = dataclasses.field(default_factory=dict)

    def __call__(self, replies: Sequence[str]) -> Float[np.ndarray, "N C L"]:
        """Probabilities of the levels, mechanisms and levels in the order of MECHANISMS and LEVELS."""
        found = np.zeros((len(replies), len(MECHANISMS), len(LEVELS)))
        if not replies:
            return found
        vectors = self.words.transform(replies)
        for column, name in enumerate(MECHANISMS):
            model = self.models[name]
            found[:, column, [LEVELS.index(level) for level in model.classes_]] = model.predict_proba(vectors)
        return found

    def levels(self, replies: Sequence[str]) -> list[dict[str, str]]:
        """The likeliest level of each mechanism in each reply."""
        best = self(replies).argmax(axis=-1)
        return [{name: LEVELS[row[c]] for c, name in enumerate(MECHANISMS)} for row in best]


def train_linear(pairs: Sequence[EpitomePair], *, holdout: float = 0.2, seed: int = 0) -> LinearJudge:
    """A judge of all `pairs`; the same pairs give the same judge.

    `held_out` is measured on this share of the seekers' posts, drawn by `seed`.
    """
    train, rest = split_by_seeker(pairs, holdout=holdout, seed=seed)
    trial = LinearJudge(*_fitted(train))
    guesses = trial.levels([pair.response_post for pair in rest])
    held_out = {}
    for name in MECHANISMS:
        gold, guess = [pair.levels[name] for pair in rest], [levels[name] for levels in guesses]
        held_out[name] = {
            "weighted_f1": f1(gold, guess, "weighted"),
            "macro_f1": f1(gold, guess, "macro"),
            "kappa": cohens_kappa(gold, guess),
            "pairs": len(gold),
        }
    return LinearJudge(*_fitted(pairs), held_out)


def _fitted(pairs: Sequence[EpitomePair]) -> tuple[Any, dict[str, Any]]:
    from sklearn.feature_extraction.text import TfidfVectorizer  # takes a second to import: only when asked
    from sklearn.linear_model import LogisticRegression
    from threadpoolctl import threadpool_limits

    # The question mark is a word here: explorations are questions.
    words = TfidfVectorizer(ngram_range=(1, 2), min_df=_MIN_DOCUMENTS, sublinear_tf=True, token_pattern=r"\w+|\?")
    vectors = words.fit_transform([pair.response_post for pair in pairs])
    with threadpool_limits(1):  # so small a problem is slower on several threads, far slower on a busy machine
        models = {
            name: LogisticRegression(C=_INVERSE_PENALTY, solver="newton-cg").fit(
                vectors, [pair.levels[name] for pair in pairs]
            )
            for name in MECHANISMS
        }
    return words, models


def load_linear(data_dir: str = "") -> LinearJudge:
    """The judge of EPITOME in `data_dir` (empty = EMPAX_DATA_DIR), trained here in seconds.

    Raises:
      ConfigError: EPITOME is not there.
      DataError: its files are damaged.
    """
    return _load(find_epitome(data_dir or None))


@functools.cache
def _load(folder: Path) -> LinearJudge:
    return train_linear(load_epitome(folder))
