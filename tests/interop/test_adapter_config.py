"""What is read of PEFT's `adapter_config.json`, and how long its regular expressions may take."""

import dataclasses
import json
import logging

import pytest

from empax.core.config import ConfigError
from empax.core.files import DataError
from empax.interop import adapter_config
from empax.interop.adapter_config import read_adapter_config
from empax.models.lora import MAX_RANK
from tests.interop import oracle

PLAIN = {"base_model_name_or_path": "base", "target_modules": ["q_proj"]}
NAME = "model.layers.0.self_attn.q_proj"


@pytest.fixture
def read(tmp_path):
    def settings(**fields):
        (tmp_path / "adapter_config.json").write_text(json.dumps(PLAIN | fields))
        return read_adapter_config(tmp_path)

    return settings


def test_every_field_of_peft_is_known():
    peft = oracle.import_peft()
    theirs = {field.name for field in dataclasses.fields(peft.LoraConfig)}
    known = adapter_config._READ | adapter_config._IDLE | adapter_config._OFF
    assert theirs <= known
    defaults = json.loads(json.dumps(peft.LoraConfig().to_dict(), default=str))
    assert not [name for name in adapter_config._OFF if defaults.get(name)]


def test_fields_that_are_unknown_are_named(read, caplog):
    with caplog.at_level(logging.WARNING, "empax"):
        read(use_next=False, next_config=None, next_list=[])
    assert "unknown fields, assumed to be off: next_list, use_next." in caplog.text
    for value in (True, 0, 0.0, "x", {"a": 1}):
        with pytest.raises(ConfigError, match=r"next = .* is not read here"):
            read(next=value)


@pytest.mark.parametrize(
    "fields",
    [
        {"target_modules": r"(?:[a-z_.\d]|\w|.)*(?<!j)"},
        {"exclude_modules": r"(?:[a-z_.\d]|\w|.)*(?<!j)"},
        {"layers_to_transform": [0], "layers_pattern": r"(?:[a-z_.\d]|\w|.)*(?<!\w)"},
        {"rank_pattern": {r"(?:a|ab|abc|.|..|\w)*(?<!j)": 2}},
        {"alpha_pattern": {r"(.*?)(.*?)(.*?)(.*?)(.*?)(.*?)(.*?)(.*?)(.*?)(.*?)(?<!j)": 2}},
    ],
)
def test_patterns_that_run_for_ever_are_refused(fields, read, monkeypatch):
    monkeypatch.setattr(adapter_config, "SECONDS", 0.05)
    config = read(**fields)
    with pytest.raises(ConfigError, match=r"takes forever on the name 'model.*, or list the modules"):
        config.targeted(NAME), config.factor_of(NAME)


def test_the_time_is_that_of_all_patterns_together(read, monkeypatch):
    """A thousand that take a little are too long as well."""
    monkeypatch.setattr(adapter_config, "SECONDS", 0.05)
    config = read(rank_pattern={rf"(.*?)(.*?)(.*?)(.*?)(.*?)(?<!j){number}": 2 for number in range(1000)})
    with pytest.raises(ConfigError, match="takes forever"):
        config.rank_of(NAME)


@pytest.mark.parametrize("pattern", ["(" * 400 + "q" + ")" * 400, "q" * 30_000, "q(", "q{99999999999999}"])
def test_what_is_no_pattern_is_refused(pattern, read):
    for name, value in (("target_modules", pattern), ("exclude_modules", pattern), ("layers_pattern", [pattern])):
        with pytest.raises(DataError, match=name):
            read(**{name: value})
    for name in ("rank_pattern", "alpha_pattern"):
        with pytest.raises(DataError, match=name):
            read(**{name: {pattern: 2}})


def test_what_fills_the_memory_is_never_compiled(read, monkeypatch):
    """These take gigabytes: each of 31 letters, or all together."""

    def never(pattern):
        raise AssertionError(pattern)

    read(target_modules=r"model\.layers\.(?:[0-9]{1,2})\.self_attn\.(q|k)_proj")
    monkeypatch.setattr(adapter_config.regex, "compile", never)
    for pattern in ("(?:(?:(?:a{1000}){1000}){1000})", "(?:(?:a{999,}){999,}){999,}", "(a){500000}"):
        with pytest.raises(DataError, match=r"target_modules = .* is too large to be compiled"):
            read(target_modules=pattern)
    monkeypatch.setattr(adapter_config.regex, "compile", lambda pattern: None)
    with pytest.raises(DataError, match=r"rank_pattern = .* is too large"):
        read(rank_pattern={f"(a){{{1000 + i}}}": 2 for i in range(1000)})


@pytest.mark.parametrize(
    ("key", "fits"),
    [
        ("q_proj", True),
        ("self_attn.q_proj", True),
        ("attn.q_proj", False),  # names count from a dot on
        ("^model.*q_proj", True),
        ("^self_attn.*", False),  # the start is that of the whole name
        ("(q|k)_proj", True),
        ("q_pro", False),
        (r"layers\.0\.self_attn\.q_proj", True),
        (r"layers\.\d+\..*", True),
    ],
)
def test_a_pattern_of_ranks_counts_as_in_peft(key, fits, read):
    peft = oracle.import_peft()
    assert read(r=5, rank_pattern={key: 3}).rank_of(NAME) == (3 if fits else 5)
    assert (peft.utils.other.get_pattern_key([key], NAME) == key) == fits


def test_ranks_have_a_bound(read):
    assert read(r=MAX_RANK).rank == MAX_RANK
    with pytest.raises(DataError, match=f"r = 1000000 must be a whole number from 1 to {MAX_RANK}"):
        read(r=10**6)
    with pytest.raises(DataError, match=r"rank_pattern\.q = 1000000 must be"):
        read(rank_pattern={"q": 10**6})
