"""Every number in settings has a range: silly values are refused with a name, or accepted as the table says."""

import dataclasses
import importlib
import math
import pkgutil
import types
import typing

import pytest

import empax
from empax.core.config import ConfigError, check_numbers, to_settings
from empax.core.system import AnswerOptions, Stage

OPTIONAL = {"empax.retrieval.beam"}
OPTIONAL |= {
    f"empax.{command}" for command in ("main", "chat", "demo", "evaluate", "export", "judges", "serve", "sweep")
}
"""Modules with flags, or with packages that few have; none has settings."""


def settings_classes():
    found = {}
    for module in pkgutil.walk_packages(empax.__path__, "empax."):
        if module.name in OPTIONAL:
            continue
        for value in vars(importlib.import_module(module.name)).values():
            if not (isinstance(value, type) and dataclasses.is_dataclass(value) and value.__module__ == module.name):
                continue
            words = ("Settings", "Stage", "Options", "Weights", "Group")
            if value.__name__.endswith(words) and value not in (Stage, AnswerOptions):  # those come from no config
                found[f"{module.name.removeprefix('empax.')}.{value.__name__}"] = value
    return found


CLASSES = settings_classes()

NEEDED = {
    "LoopSettings": {"steps": 1, "batch_size": 1, "buckets": (8,)},
    "ParamGroup": {"pattern": "a"},
    "evaluate.Settings": {"stage": "generator"},
    "assess.Settings": {"judges": ("identifiers",)},
    "generator.settings.LossSettings": {"function": "module:name"},
    "RewardSettings": {"kind": "novelty"},
    "FinetuneSettings": {
        "epochs": 1,
        "batch_size": 8,
        "learning_rate": None,
        "max_source_tokens": 8,
        "max_target_tokens": 8,
        "seed": 0,
    },
}
"""What a class cannot be made without."""


def needed(name):
    return next((values for end, values in NEEDED.items() if name.endswith(end)), {})


def number_fields():
    for name, cls in CLASSES.items():
        for field, hint in typing.get_type_hints(cls).items():
            options = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
            for kind in (int, float):
                if kind in options:
                    yield name, field, kind


FIELDS = sorted(number_fields(), key=str)

NEGATIVE = {
    "core.sharding.MeshSettings.data": (-1,),  # all devices that the other axes leave
    "decoding.settings.DecodeSettings.length_penalty": (-1, -1.5),
    "decoding.settings.DecodeSettings.rerank_length": (-1, -1.5),
    "systems.emprl.settings.RewardSettings.weight": (-1, -1.5, -1e29),  # a penalty
    "parts.generator.settings.LossSettings.weight": (-1, -1.5, -1e29),  # a reward
}
"""Negative values that mean something."""

ZERO_REFUSED = (
    "steps", "batch_size", "accumulate", "epochs", "minibatches", "eval_batch_size", "log_every_steps",
    "eval_every_steps", "checkpoint_every_steps", "patience", "max_eval_examples", "vocab_size",
    "bootstrap_samples", "head_examples", "candidates@index", "num_leaves", "leaves_to_search",
    "dimensions_per_block", "reorder", "training_sample", "insert_rows", "passages", "explore_tokens",
    "target_temperature", "score_temperature", "holdout", "max_tokens", "max_context_tokens", "target",
    "horizon", "clip", "guard_tolerance", "kept_share", "max_turns", "value_clip",
    "max_passage_tokens", "max_target_tokens", "max_query_tokens", "max_key_tokens", "rank", "alpha",
    "max_shard_bytes", "fsdp", "tensor", "data", "d_model", "num_heads", "d_ff", "max_positions", "unroll",
    "head_dim", "num_encoder_layers", "num_decoder_layers", "num_beams", "num_samples", "temperature", "top_p",
    "clip_norm", "eps", "num_beam_groups", "num_return_sequences", "typical_p", "repetition_penalty",
    "encoder_repetition_penalty", "epsilon_high",
    "min_count", "searched", "width", "latent", "teacher_decay_steps", "kernel",
    "facts_tokens", "social_tokens", "own_tokens", "max_piece_tokens", "max_candidates", "tails", "entity_facts",
    "hidden", "rows@study", "comparisons", "max_source_tokens",
    "knn", "knn_temperature", "copy_temperature", "facts@AlignmentSettings",
    "tokens@AlignmentSettings", "tail_tokens", "each@ConceptsSettings", "beta@PreferenceTaskSettings",
    "places", "num_actions", "state_time", "weight@ContrastSettings", "weight@nec",
)  # fmt: skip
"""Fields for which 0 means nothing; for all others it switches something off, or means all."""


def make(name, field, value):
    return to_settings(CLASSES[name], {**needed(name), field: value}, where="config.x")


@pytest.mark.parametrize(("name", "field", "kind"), FIELDS, ids=lambda value: getattr(value, "__name__", value))
def test_silly_numbers_are_refused_by_name(name, field, kind):
    silly = [-1, -(2**40), 2**63, 10**400] if kind is int else [-1.5, -1e29, 1e31, math.nan, math.inf, -math.inf]
    allowed = NEGATIVE.get(f"{name}.{field}", ())
    for value in silly:
        if value in allowed:
            make(name, field, value)
            continue
        with pytest.raises(ConfigError, match=rf"config\.x.*\b{field}\b"):
            make(name, field, value)
    refused = {field, f"{field}@{name.split('.')[1]}", f"{field}@{name.split('.')[-1]}"} & set(ZERO_REFUSED)
    if not refused:
        make(name, field, kind(0))
        return
    with pytest.raises(ConfigError, match=field):
        make(name, field, kind(0))


def test_the_tables_name_fields_that_there_are():
    assert len(CLASSES) >= 28
    assert len(FIELDS) > 120
    assert set(NEGATIVE) <= {f"{name}.{field}" for name, field, _ in FIELDS}
    assert {name.partition("@")[0] for name in ZERO_REFUSED} <= {field for _, field, _ in FIELDS}


@dataclasses.dataclass(frozen=True)
class Numbers:
    share: float = 0.5
    count: int | None = None


@pytest.mark.parametrize(
    ("bounds", "share", "message"),
    [
        ({"least": 0, "most": 1}, 1.5, r"share = 1\.5 must lie in \[0, 1\]"),
        ({"above": 0, "below": 1}, 0.0, r"share = 0\.0 must lie in \(0, 1\)"),
        ({"least": 0, "below": 1}, 1.0, r"must lie in \[0, 1\)"),
        ({"above": 0}, 0.0, "share = 0.0 must be above 0"),
        ({"least": 2}, 1.0, "must be at least 2"),
        ({"least": 0}, 1e31, r"must be at most 1e\+30"),
        ({}, math.nan, "share = nan must be"),
        ({"most": 3}, 4.0, "must be at most 3"),
        ({"below": 3}, 3.0, "must be below 3"),
    ],
)
def test_a_number_outside_its_range_is_told_the_range(bounds, share, message):
    with pytest.raises(ConfigError, match=message):
        check_numbers(Numbers(share), "share", "count", **bounds)


def test_the_ends_of_a_range_belong_to_it_and_none_is_no_number():
    check_numbers(Numbers(0.0), "share", "count", least=0, below=1)
    check_numbers(Numbers(1.0), "share", "count", above=0, most=1)
    for largest, wrong in ((Numbers(1e30, 2**31 - 1), Numbers(1.1e30)), (Numbers(-1e30), Numbers(count=2**31))):
        check_numbers(largest, "share", "count")
        with pytest.raises(ConfigError, match="must be at most"):
            check_numbers(wrong, "share", "count")
