"""What reward functions of users may return, and the message for anything else."""

import dataclasses
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from empax.core.config import ConfigError
from empax.core.plugins import load_function
from empax.core.text_functions import LARGEST_SCORE, checked_numbers
from empax.core.types import Instance
from empax.systems.emprl.rewards import rate_on_host, rate_texts, try_functions
from empax.systems.emprl.settings import RewardSettings


def called(function, rows, responses):
    return rate_texts(function, "m:f", rows)(np.arange(len(rows)), responses)


ROWS = (Instance("a#2", ("hi",), "yes", ""), Instance("b#2", ("oh",), "no", ""))


@pytest.fixture
def module(monkeypatch):
    """An importable module to put functions into."""
    made = types.ModuleType("rewards_of_somebody")
    monkeypatch.setitem(sys.modules, made.__name__, made)
    return made


@pytest.mark.parametrize(
    "found",
    [
        [1, 0.5],
        (True, False),
        np.array([True, False]),
        jnp.array([1.0, 2.0]),
        [np.float32(1), np.int64(2)],
        [jnp.float32(1.0), 2],
        [LARGEST_SCORE, -LARGEST_SCORE],
    ],
    ids=repr,
)
def test_numbers_of_any_kind_are_taken(found):
    scores = checked_numbers(found, "the reward m:f", 2)
    assert scores.dtype == np.float64
    np.testing.assert_allclose(scores, [float(x) for x in found])


@pytest.mark.parametrize(
    ("found", "message"),
    [
        ((x for x in (1.0, 2.0)), "returned a generator for 2 responses; it must return a list or an array of 2"),
        ("12", "returned a str"),
        (["1.0", "2.0"], "a list with '1.0' in it"),
        ([1j, 1.0], "a list with 1j in it"),
        ([[1.0], [2.0]], r"a list with \[1\.0\] in it"),
        ([1.0], r"numbers of shape \(1,\) for 2 responses"),
        (np.array(["1", "2"]), "an array of <U1"),
        (np.float32(1.0), r"numbers of shape \(\)"),
        ([float("nan"), 1.0], "returned nan"),
        ([1e300, 1.0], r"returned 1e\+300 .* between -1e\+15 and 1e\+15"),
        ([10**400, 1.0], "an array of object"),
    ],
)
def test_anything_else_is_refused_with_what_it_must_be(found, message):
    with pytest.raises(ConfigError, match=rf"the reward m:f .*{message.removeprefix('returned ')}"):
        checked_numbers(found, "the reward m:f", 2)


def test_a_function_that_fails_is_named_with_the_place():
    def fails(contexts, responses, references):
        raise KeyError("no such key")

    with pytest.raises(ConfigError, match=r"m:f raised KeyError: 'no such key' \(.*test_functions\.py, line"):
        called(fails, ROWS, ["yes", "no"])
    with pytest.raises(ConfigError, match=r"raised TypeError: .* takes 2 positional arguments"):
        called(lambda contexts, responses: [1.0, 1.0], ROWS, ["yes", "no"])


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("./odd_rewards.py:constant", "is not 'module:name'; write no path and no '.py'"),
        ("odd-rewards:constant", "is not 'module:name'"),
        ("math:", "is not 'module:name'"),
        ("no_such_module:f", "there is no module 'no_such_module'; put its folder on PYTHONPATH"),
        ("math:nothing", "math has no function 'nothing'"),
        ("math:pi", "math has no function 'pi'"),
        ("broken_reward:f", "the import raised ZeroDivisionError: division by zero"),
    ],
)
def test_a_name_without_a_function_is_refused(name, message, tmp_path, monkeypatch):
    (tmp_path / "broken_reward.py").write_text("1 / 0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError, match=message):
        load_function(name)


@dataclasses.dataclass(frozen=True)
class Scorer:
    params: dict

    def __call__(self, params, rollout):
        return rollout["x"].sum(axis=1) * params["w"]


ROLLOUT = {"x": jax.ShapeDtypeStruct((2, 3), jnp.float32)}


def test_functions_are_tried_on_two_rows(module):
    calls = []
    module.text = lambda c, r, g: calls.append((c, r, g)) or [1.0] * len(r)
    module.compiled = lambda rollout: rollout["x"].sum(axis=1)
    module.scorer = Scorer({"w": jnp.ones(())})
    parts = [
        RewardSettings(kind=kind, stages=(), function=f"{module.__name__}:{name}")
        for kind, name in (("text", "text"), ("compiled", "compiled"), ("compiled", "scorer"))
    ]
    try_functions([RewardSettings(), *parts], lambda fields: ROWS, ROLLOUT)
    assert calls == [([("hi",), ("oh",)], ["yes", "no"], ["yes", "no"])]


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda rollout: rollout["x"], r"must return an array of shape \(2,\)"),
        (lambda rollout: None, r"returns None for 2 rows"),
        (lambda rollout: rollout["x"].sum(), r"must return an array of shape \(2,\)"),
        (lambda rollout: rollout["x"].sum(axis=1).astype(complex), "of numbers"),
        (lambda rollout: rollout["y"], "raised KeyError: 'y'"),
        (lambda rollout: float(rollout["x"].sum()), "raised ConcretizationTypeError"),
    ],
)
def test_a_compiled_function_is_traced_before_work(module, function, message):
    module.f = function
    part = RewardSettings(kind="compiled", stages=(), function=f"{module.__name__}:f")
    with pytest.raises(ConfigError, match=message):
        try_functions([part], lambda fields: ROWS, ROLLOUT)


NOTED = (
    Instance("a#2", ("hi",), "yes", "joyful", {"topic": "sea", "bad key": 1}),
    Instance("b#2", ("oh",), "no", "", {"score": 2}),
)


def test_functions_are_given_the_fields_that_they_name():
    asked = {}

    def some(contexts, responses, references, topic, *, emotion=None, unknown=7):
        asked.update(topic=topic, emotion=emotion, unknown=unknown)
        return [0.0, 1.0]

    def everything(contexts, responses, references, **fields):
        asked.update(fields)
        return [0.0, 1.0]

    np.testing.assert_array_equal(called(some, NOTED, ["x", "y"]), [0.0, 1.0])
    assert asked == {"topic": ["sea", None], "emotion": ["joyful", ""], "unknown": 7}
    asked.clear()
    called(everything, NOTED, ["x", "y"])
    assert asked == {"id": ["a#2", "b#2"], "emotion": ["joyful", ""], "topic": ["sea", None], "score": [None, 2]}


def test_a_field_may_be_called_what_a_function_calls_its_texts():
    rows = [dataclasses.replace(one, notes={"references": "gold", "said": "yes", "topic": "sea"}) for one in NOTED]
    asked = {}

    def everything(contexts, said, references, **fields):
        asked.update(fields, texts=(said, references))
        return [0.0, 1.0]

    called(everything, rows, ["x", "y"])
    assert asked == {
        "id": ["a#2", "b#2"], "emotion": ["joyful", ""], "topic": ["sea", "sea"],
        "texts": (["x", "y"], ["yes", "no"]),
    }  # fmt: skip


def test_a_field_that_no_row_has_is_named(module):
    def wants(contexts, responses, references, tpoic):
        return [0.0] * len(responses)

    with pytest.raises(
        ConfigError, match="the reward m:f asks for tpoic; the fields of its rows are emotion, id, score, topic"
    ):
        called(wants, NOTED, ["x", "y"])
    module.f = wants
    reward = [RewardSettings(kind="text", function=f"{module.__name__}:f")]
    with pytest.raises(ConfigError, match="needs tpoic; the fields of its rows will be emotion, facts, id"):
        try_functions(reward, lambda fields: ROWS, None, ["facts"])
    try_functions(reward, lambda fields: ROWS, None, ["tpoic"])  # which a stage is going to add


def test_rows_are_asked_for_by_the_fields_that_a_function_must_have(module):
    module.f = lambda contexts, responses, references, topic, facts, *, score=None: [len(t) for t in topic]
    asked = []
    reward = [RewardSettings(kind="text", function=f"{module.__name__}:f")]
    try_functions(reward, lambda fields: asked.append(set(fields)) or NOTED, None, ["facts"])
    assert asked == [{"topic"}]


def test_a_batch_whose_rows_all_lack_a_field_that_others_have_is_given_none(module):
    def topical(contexts, responses, references, topic):
        return [float(bool(one)) for one in topic]

    tokenizer = types.SimpleNamespace(decode=lambda ids: "yes")
    rate = rate_on_host(rate_texts(topical, "m:f", NOTED), tokenizer)
    rollout = types.SimpleNamespace(
        batch=types.SimpleNamespace(row=np.array([1, -1])), tokens=np.zeros((2, 1), np.int32)
    )
    np.testing.assert_array_equal(rate({}, rollout), [0.0, 0.0])
