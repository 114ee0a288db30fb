"""What stops a comparison of PPO whose sides do not do the same."""

import argparse
import dataclasses

import numpy as np
import pytest

pytestmark = [pytest.mark.oracle, pytest.mark.slow]

OPTIONS = argparse.Namespace(smoke=True, unroll=1, batch=4, source=8, new_tokens=6)
ONCE = {"epochs": 1, "minibatches": 1}


@pytest.fixture(scope="module")
def prepared():
    from benchmarks.ppo import prepare

    return prepare("t5-small", "float32", OPTIONS)


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"lam": 0.9}, "advantages"),
        ({"clip": 0.1}, "losses over all"),
        ({"value_clip": 0.1}, "losses over all"),
        ({}, "values: relative error"),  # of another value head
    ],
)
def test_another_algorithm_is_noticed(prepared, changes, found):
    from benchmarks.paired import DisagreementError
    from benchmarks.ppo import OurPpo, TheirPpo, check

    policy, inputs = prepared
    other = policy._replace(settings=dataclasses.replace(policy.settings, **changes))
    if not changes:
        other = policy._replace(value={**policy.value, "out": np.asarray(policy.value["out"]) * 1.01})
    with pytest.raises(DisagreementError, match=found):
        check(OurPpo(policy, [inputs], **ONCE), TheirPpo(other, [inputs], **ONCE), inputs)
