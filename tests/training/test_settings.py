"""How long a stage is trained, where its corpus is small."""

import dataclasses

import pytest

from empax.core.config import ConfigError
from empax.training.optimizer import OptimizerSettings, ParamGroup
from empax.training.settings import LONGEST_BUCKET, LoopSettings, check_buckets, within_passes

GROUPS = (ParamGroup("^a", warmup_steps=40), ParamGroup("^b"))
SETTINGS = LoopSettings(
    steps=1000,
    batch_size=16,
    buckets=(32,),
    log_every_steps=50,
    eval_every_steps=250,
    checkpoint_every_steps=250,
    refresh_every_steps=0,
    optimizer=OptimizerSettings(warmup_steps=100, groups=GROUPS),
)


def test_buckets_have_from_one_token_to_the_most():
    check_buckets((1, LONGEST_BUCKET))
    for buckets in ((0, 8), (8, LONGEST_BUCKET + 1), (8, 8), ()):
        with pytest.raises(ConfigError, match="must be ascending lengths in tokens"):
            check_buckets(buckets)


@pytest.mark.parametrize(("examples", "most"), [(1600, 10), (100_000, 10), (3, 0)])
def test_steps_stay_where_the_corpus_is_large_enough_or_nothing_is_asked(examples, most):
    assert within_passes(SETTINGS, examples, most) is SETTINGS


def test_on_a_small_corpus_everything_shrinks_by_one_factor():
    found = within_passes(SETTINGS, 400, 10)
    assert found.steps == 250
    assert found.steps * found.batch_size == 10 * 400
    assert (found.log_every_steps, found.eval_every_steps, found.checkpoint_every_steps) == (12, 62, 62)
    assert found.refresh_every_steps == 0
    assert found.optimizer.warmup_steps == 25
    assert [group.warmup_steps for group in found.optimizer.groups] == [10, None]
    kept = dataclasses.replace(found, optimizer=SETTINGS.optimizer)
    assert (kept.batch_size, kept.buckets, kept.best_metric) == (16, (32,), "loss")
    assert within_passes(SETTINGS, 8, 10).steps == 10  # each of one batch, which is not full
    least = within_passes(SETTINGS, 1, 1)
    assert (least.steps, least.eval_every_steps, least.optimizer.warmup_steps) == (1, 1, 1)
