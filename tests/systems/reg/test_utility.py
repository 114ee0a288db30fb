"""What distillation changes, against numbers by hand."""

import flax.struct
import jax
import numpy as np
import pytest

from empax.core.sharding import MeshSettings
from empax.core.types import Instance
from empax.data.exemplars import ExemplarExamples
from empax.systems.reg.tasks import RetrieverTask, first_choice
from empax.systems.reg.utility import measure_utility
from empax.training.settings import LoopSettings

CONTEXTS, K = 11, 3
WORTH = np.random.default_rng(0).random((CONTEXTS, K)).astype(np.float32)
SCORES = {name: np.random.default_rng(seed).normal(size=(CONTEXTS, K)) for name, seed in (("before", 1), ("after", 2))}


@flax.struct.dataclass
class Candidates:
    number: jax.Array
    valid: jax.Array
    candidate_mask: jax.Array
    utilities: jax.Array | None = None


class Known(RetrieverTask):
    """Looks up what G1 and a retriever make of the candidates of a numbered context."""

    def __init__(self):
        pass

    def utilities(self, generator, batch, rng):
        return generator[batch.number]

    def gains(self, params, batch):
        return first_choice(params[batch.number], batch)


class Numbered(ExemplarExamples):
    """Context 4 has no candidates, context 5 only the first; two contexts make a dialogue."""

    def __init__(self, mask):
        self.mask, self.lengths = mask, np.arange(CONTEXTS) % 4 + 1
        self.instances = [Instance(f"d{i // 2}#{i % 2}", ("a",), "b", "") for i in range(CONTEXTS)]

    def __len__(self):
        return CONTEXTS

    def collate(self, indices, length, rng):
        number = np.maximum(indices, 0)
        return Candidates(number, indices >= 0, self.mask[number] & (indices >= 0)[:, None])


def measured(mask):
    loop = LoopSettings(steps=1, batch_size=4, buckets=(2, 4))
    return measure_utility(Known(), WORTH, SCORES, Numbered(mask), loop, MeshSettings())


def test_the_gain_is_that_of_the_first_choice_over_the_mean_candidate_with_its_interval():
    mask = np.ones((CONTEXTS, K), bool)
    mask[4], mask[5, 1:] = False, False
    found, known = measured(mask), np.delete(np.arange(CONTEXTS), 4)
    means = np.array([WORTH[i][mask[i]].mean() for i in known])
    best = {
        name: np.array([WORTH[i][np.where(mask[i], scores[i], -np.inf).argmax()] for i in known]) - means
        for name, scores in SCORES.items()
    }
    expected = {
        "utility": means, "utility_gain": best["after"], "utility_gain_before": best["before"],
        "utility_gain_minus_before": best["after"] - best["before"],
        "utility_gain_at_most": np.array([WORTH[i][mask[i]].max() for i in known]) - means,
    }  # fmt: skip
    assert found.pop("contexts") == len(known)
    assert set(found) == set(expected)
    for name, values in expected.items():
        cell = found[name]
        assert cell["value"] == pytest.approx(values.mean(), abs=1e-6)
        assert cell["low"] < cell["value"] < cell["high"]
        # About the standard error of means of six dialogues, whose tails are those of Student's t.
        assert 2 < (cell["high"] - cell["low"]) / (values.std() / len(values) ** 0.5) < 9


def test_without_candidates_there_is_nothing_to_say():
    assert measured(np.zeros((CONTEXTS, K), bool)) == {"contexts": 0}
