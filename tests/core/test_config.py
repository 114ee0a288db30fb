from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

import pytest
from ml_collections import ConfigDict

from empax.core.config import ConfigError, check_types, split_keys, to_settings


@dataclasses.dataclass(frozen=True)
class Inner:
    size: int = 3

    def __post_init__(self):
        if self.size < 1:
            raise ValueError(f"size = {self.size} must be at least 1.")


@dataclasses.dataclass(frozen=True)
class Outer:
    name: str
    rate: float = 0.1
    mode: Literal["a", "b"] = "a"
    inner: Inner = Inner()
    sizes: tuple[int, ...] = ()
    pair: tuple[int, str] = (1, "x")
    limit: int | None = None
    either: int | str = 0
    weights: Mapping[str, float] = dataclasses.field(default_factory=dict)
    inners: tuple[Inner, ...] = ()
    anything: Any = None


def test_types_of_fields_are_checked_as_those_of_settings_are():
    check_types(Outer("n", rate=2, sizes=(1, 2), limit=None, either="x"))
    for changes, message in (
        ({"sizes": (1, "2")}, r"^sizes\[1\] = '2' is of type str; it must be int"),
        ({"limit": True}, "^limit = True is of type bool; it must be int"),
    ):
        with pytest.raises(ConfigError, match=message):
            check_types(Outer(**({"name": "n"} | changes)))


def test_makes_nested_settings_of_a_config_dict():
    values = ConfigDict({"name": "n", "rate": 2, "inner": {"size": 5}, "sizes": [1, 2], "weights": {"bleu": 1},
                         "either": "text", "inners": [{"size": 7}], "pair": (2, "y")})  # fmt: skip
    made = to_settings(Outer, values, where="config.stage")
    assert made == Outer("n", 2.0, inner=Inner(5), sizes=(1, 2), weights={"bleu": 1.0}, either="text",
                         inners=(Inner(7),), pair=(2, "y"))  # fmt: skip
    assert isinstance(made.rate, float)
    assert to_settings(Outer, {"name": "n", "inner": Inner(9), "limit": 4}, where="c").limit == 4


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"nam": "n"}, r"^config\.stage\.nam is not a setting of Outer; did you mean 'name'\? It takes: anything, "),
        ({"name": "n", "zzz": 1}, r"config\.stage\.zzz is not a setting of Outer\. It takes:"),
        ({"name": "n", "inner": {"siez": 1}}, r"stage\.inner\.siez is not a setting of Inner; did you mean 'size'"),
        ({}, r"config\.stage lacks name, which Outer needs; set it in the config file"),
        ({"name": 3}, r"config\.stage\.name = 3 is of type int; it must be str"),
        ({"name": "n", "rate": True}, r"rate = True is of type bool; it must be float"),
        ({"name": "n", "limit": 1.5}, r"limit = 1.5 is of type float; it must be int"),
        ({"name": "n", "mode": "c"}, r"mode = 'c' is not allowed; it takes one of 'a', 'b'"),
        ({"name": "n", "sizes": "12"}, r"sizes = '12' must be a list, like \['12'\]"),
        ({"name": "n", "sizes": [1, "2"]}, r"sizes\[1\] = '2' is of type str; it must be int"),
        ({"name": "n", "pair": [1]}, r"pair = \[1\] must have 2 entries"),
        (None, r"config\.stage = None must be a section of settings \(Outer\)"),
        ({"name": "n", "inner": 4}, r"inner = 4 must be a section of settings \(Inner\)"),
        ({"name": "n", "inner": {"size": 0}}, r"config\.stage\.inner: size = 0 must be at least 1"),
        ({"name": "n", "weights": 1}, r"weights = 1 must map names to values"),
        ({"name": "n", "weights": {"bleu": "x"}}, r"weights\.bleu = 'x' is of type str"),
    ],
)  # fmt: skip
def test_errors_name_the_path_what_was_found_and_what_is_allowed(values, message):
    with pytest.raises(ConfigError, match=message):
        to_settings(Outer, values, where="config.stage")


def test_split_keys_deals_out_and_refuses_what_nobody_has():
    inner, outer = split_keys({"size": 1, "name": "n", "rate": 1.0}, Inner, Outer, where="config.stage")
    assert inner == {"size": 1}
    assert outer == {"name": "n", "rate": 1.0}
    with pytest.raises(ConfigError, match=r"\.sise is not a setting of Inner \+ Outer; did you mean 'size"):
        split_keys({"sise": 1}, Inner, Outer, where="config.stage")
    with pytest.raises(ConfigError, match=r"config\.stage: Inner \+ Inner both have '\w+'; rename one of them"):
        split_keys({}, Inner, Inner, where="config.stage")
