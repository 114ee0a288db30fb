"""What contexts let expect: scikit-learn's logistic regression as the oracle, and that no gold level leaks."""

import jax.numpy as jnp
import numpy as np
import pytest
from sklearn.linear_model import LogisticRegression

from empax.systems.emprl.expectations import FOLDS, STRENGTH, expected_levels, fit

ROWS, SIZE = 400, 6


def corpus(seed=0):
    """Unit vectors, and levels of three mechanisms that depend on them; one level of the second never occurs."""
    rng = np.random.default_rng(seed)
    vectors = rng.normal(size=(ROWS, SIZE))
    vectors = (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)
    logits = 4.0 * vectors @ rng.normal(size=(SIZE, 9)) + rng.gumbel(size=(ROWS, 9))
    levels = logits.reshape(ROWS, 3, 3).argmax(axis=2)
    levels[:, 1] = np.where(levels[:, 1] == 1, 0, levels[:, 1])
    return vectors, levels.astype(np.int32)


@pytest.mark.oracle
def test_the_fit_is_scikit_learns():
    vectors, levels = corpus()
    weights = np.ones(ROWS, np.float32)
    weights[:50] = 0.0
    found = fit(jnp.asarray(vectors), jnp.eye(3)[levels], jnp.asarray(weights))
    for m in (0, 2):
        oracle = LogisticRegression(C=STRENGTH, max_iter=500, tol=1e-8).fit(vectors[50:], levels[50:, m])
        logits = vectors @ np.asarray(found["weights"])[:, m] + np.asarray(found["bias"])[m]
        probabilities = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
        np.testing.assert_allclose(probabilities, oracle.predict_proba(vectors), atol=2e-4)


def test_expectations_follow_the_contexts_and_never_the_own_dialogue():
    vectors, levels = corpus()
    dialogues = [f"d{row // 2}" for row in range(ROWS)]
    found = expected_levels(vectors, levels, dialogues)
    np.testing.assert_allclose(found.sum(axis=2), 1.0, rtol=1e-5)
    assert found[:, 1, 1].max() < 0.02
    hit = (found.argmax(axis=2) == levels).mean(axis=0)
    assert (hit > np.array([(levels == 0).mean(axis=0), (levels == 2).mean(axis=0)]).max(axis=0)).all()
    # The gold levels of the first dialogue change: what is expected of it does not, of other folds it does.
    changed = levels.copy()
    changed[:2] = 2 - changed[:2]
    other = expected_levels(vectors, changed, dialogues)
    same_fold = np.array([row // 2 % FOLDS == 0 for row in range(ROWS)])
    np.testing.assert_array_equal(found[same_fold], other[same_fold])
    assert (np.abs(found - other)[~same_fold].max(axis=(1, 2)) > 1e-6).any()
