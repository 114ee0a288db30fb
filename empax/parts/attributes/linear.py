"""A non-neural judge: TF-IDF and logistic regression, on the reply alone.

It shares no architecture, initialization or subwords with `identifier` and `classifier`, so that it does not share
their common mistakes. Source: ours.
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
from empax.data.corpora import SETTING
from empax.data.epitome import EpitomePair, find_epitome, load_epitome, split_by_seeker
from empax.evaluation.empathy import cohens_kappa, f1

_MIN_DOCUMENTS = 2  # minimum document frequency of a term
_INVERSE_PENALTY = 10.0  # chosen among 1, 4, 10 and 30 on posts that `held_out` is not measured on


@dataclasses.dataclass(frozen=True)
class LinearJudge:
    """Predicts the levels of the mechanisms in replies.

    Attributes:
      words: scikit-learn's TF-IDF vectorizer.
      models: a logistic regression for each mechanism.
      held_out: by mechanism `weighted_f1`, `macro_f1` (percent), `kappa` and `pairs`, on a fifth of the seekers' posts,
        of a judge with the same settings that was not trained on them.
    """

    words: Any
    models: Mapping[str, Any]
    held_out: Mapping[str, Mapping[str, float]] = dataclasses.field(default_factory=dict)

    def __call__(self, replies: Sequence[str]) -> Float[np.ndarray, "N C L"]:
        """Returns probabilities of the levels, in the order of MECHANISMS and LEVELS."""
        found = np.zeros((len(replies), len(MECHANISMS), len(LEVELS)))
        if not replies:
            return found
        vectors = self.words.transform(replies)
        for column, name in enumerate(MECHANISMS):
            model = self.models[name]
            found[:, column, [LEVELS.index(level) for level in model.classes_]] = model.predict_proba(vectors)
        return found

    def levels(self, replies: Sequence[str]) -> list[dict[str, str]]:
        """Returns the likeliest level of each mechanism in each reply."""
        best = self(replies).argmax(axis=-1)
        return [{name: LEVELS[row[c]] for c, name in enumerate(MECHANISMS)} for row in best]


def train_linear(pairs: Sequence[EpitomePair], *, holdout: float = 0.2, seed: int = 0) -> LinearJudge:
    """Trains a judge on all `pairs`; the same pairs give the same judge.

    `held_out` is measured on the share `holdout` of the seekers' posts, drawn with `seed`.
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
    from sklearn.feature_extraction.text import TfidfVectorizer  # takes a second to import
    from sklearn.linear_model import LogisticRegression
    from threadpoolctl import threadpool_limits

    # The question mark is a word here: explorations are questions.
    words = TfidfVectorizer(ngram_range=(1, 2), min_df=_MIN_DOCUMENTS, sublinear_tf=True, token_pattern=r"\w+|\?")
    vectors = words.fit_transform([pair.response_post for pair in pairs])
    with threadpool_limits(1):  # a problem this small is slower on several threads, far slower on a busy machine
        models = {
            name: LogisticRegression(C=_INVERSE_PENALTY, solver="newton-cg").fit(
                vectors, [pair.levels[name] for pair in pairs]
            )
            for name in MECHANISMS
        }
    return words, models


def load_linear(data_dir: str = "", *, setting: str = SETTING) -> LinearJudge:
    """Trains the judge on EPITOME in `data_dir` (empty = EMPAX_DATA_DIR), which takes seconds; errors name `setting`.

    Raises:
      ConfigError: EPITOME does not exist.
      DataError: its files are damaged.
    """
    return _load(find_epitome(data_dir or None, setting=setting))


@functools.cache
def _load(folder: Path) -> LinearJudge:
    return train_linear(load_epitome(folder))
