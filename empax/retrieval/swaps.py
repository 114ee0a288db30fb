"""Replacements for the exemplars that a system retrieves: random, of the same turn or emotion, and an oracle's.

Letters: N instances, M available exemplars, K shown exemplars, D features.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float, Int

from empax.core.types import Instance
from empax.data.exemplars import dialogue_groups, emotion_ids, num_turns, traits
from empax.retrieval.filters import ExemplarFilter, find_exemplars
from empax.retrieval.index import IndexSettings, build_index

DRAWN = ("random", "same_turn", "same_emotion")
"""Kinds of random exemplars: from all; from those with as many turns before the reply; from those with the dialogue's
gold emotion."""

_TRIES = 4


def draw_exemplars(
    kind: str, instances: Sequence[Instance], pairs: Sequence[Instance], k: int, *, seed: int
) -> Int[np.ndarray, "N K"]:
    """Draws k rows of `pairs` per instance, all from different dialogues and situations, none from the instance's own.

    `kind` is one of DRAWN; with "same_emotion", an instance with an unknown emotion has no exemplars. Rows are padded
    with -1 if there are too few.
    """
    if kind == "same_turn":
        wanted, labels = num_turns(instances), num_turns(pairs)
    elif kind == "same_emotion":
        wanted, labels = emotion_ids(instances), emotion_ids(pairs)
    else:
        wanted, labels = np.zeros(len(instances), np.int32), np.zeros(len(pairs), np.int32)
    rng = np.random.default_rng([seed, DRAWN.index(kind)])
    own, groups = dialogue_groups(instances), dialogue_groups(pairs)
    pools = {int(label): np.flatnonzero(labels == label) for label in np.unique(labels) if label >= 0}
    none = np.zeros(0, np.int64)
    both = zip(wanted.tolist(), own.tolist(), strict=True)
    return np.stack([_draw(pools.get(label, none), groups, group, k, rng) for label, group in both])


def _draw(pool: np.ndarray, groups: np.ndarray, own: int, k: int, rng: np.random.Generator) -> Int[np.ndarray, " K"]:
    """Draws k rows of the pool from different groups, none from the group `own`."""
    found: dict[int, int] = {}
    for whole in (False, True) if len(pool) else ():  # a few draws suffice unless the pool is small
        found = {}
        order = rng.permutation(pool) if whole else pool[rng.integers(len(pool), size=_TRIES * k)]
        for row in order.tolist():
            if groups[row] != own:
                found.setdefault(int(groups[row]), row)
            if len(found) == k:
                return np.array(list(found.values()))
    return np.array([*found.values(), *[-1] * (k - len(found))])


def nearest_exemplars(
    gold: Float[np.ndarray, "N D"],
    replies: Float[np.ndarray, "M D"],
    instances: Sequence[Instance],
    pairs: Sequence[Instance],
    k: int,
) -> Int[np.ndarray, "N K"]:
    """Finds the rows of `pairs` whose replies are nearest to the gold ones: an oracle, which needs the gold responses.

    All are from different dialogues and situations, none from the instance's own; padded with -1 if fewer than k.
    `gold` and `replies` are vectors of the responses of `instances` and of `pairs`.
    """
    groups = dialogue_groups(pairs)
    index = build_index(replies, IndexSettings("exact"), groups=groups, encoder_hash="")
    one_per_dialogue = ExemplarFilter("none", 0, emotion_ids(pairs), one_per_dialogue=True)
    found = find_exemplars(index, gold, k, **traits(instances), filter=one_per_dialogue)
    return np.asarray(found.ids)
