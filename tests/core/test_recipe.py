import pytest
from ml_collections import ConfigDict

from empax.core.config import ConfigError
from empax.core.recipe import load_recipe, override, run_name, split_overrides


def test_settings_are_taken_out_of_the_command_line():
    words = ["main", "--config=c.py", "--config.a.b=1", "--workdir", "w", "--config.c", "x", "-config.d=2", "config.e"]
    rest, values = split_overrides(words)
    assert rest == ["main", "--config=c.py", "--workdir", "w", "config.e"]
    assert values == {"a.b": "1", "c": "x", "d": "2"}


@pytest.mark.parametrize("behind", [(), ("--workdir=w",)])
def test_a_setting_needs_a_value(behind):
    with pytest.raises(ConfigError, match=r"--config\.a has no value; write --config\.a=VALUE"):
        split_overrides(["main", "--config.a", *behind])


def config():
    return ConfigDict({"seed": 0, "rate": 0.5, "name": "x", "train": {"steps": 3, "buckets": (1, 2), "lora": None}})


@pytest.mark.parametrize(
    ("path", "text", "value"),
    [
        ("seed", "7", 7),
        ("rate", "1", 1.0),
        ("name", "12", "12"),
        ("train.buckets", "(4, 5)", (4, 5)),
        ("train.buckets", "a,b", ("a", "b")),
        ("train.buckets", "a", ("a",)),
        ("train.buckets", "4", (4,)),
        ("train.buckets", "a, b,", ("a", "b")),
        ("train.buckets", "", ()),
        ("train.flag", "True", True),
        ("train.flag", "false", False),
        ("train.patience", "none", None),
        ("name", "None", None),
        ("name", "none", "none"),
        ("train.fresh.deep", "adam", "adam"),
        ("train.lora.rank", "4", 4),
    ],
)
def test_values_take_the_type_that_the_recipe_has(path, text, value):
    recipe = config()
    recipe.lock()
    override(recipe, {path: text})
    node = recipe
    for name in path.split("."):
        node = node[name]
    assert node == value
    assert type(node) is type(value)


@pytest.mark.parametrize(
    ("path", "text", "says"),
    [
        ("seed", "abc", "config.seed = 'abc' does not fit: it must be int"),
        ("tran.steps", "1", "Did you mean 'train'"),
        ("sed", "1", "Did you mean 'seed'"),
        ("name.deep", "1", "is a value, not a section"),
        ("train", "1", "^config.train is a section; set one of its keys: buckets, lora, steps.$"),
    ],
)
def test_what_does_not_fit_is_named(path, text, says):
    with pytest.raises(ConfigError, match=says):
        override(config(), {path: text})


def test_recipes_come_from_files_with_an_argument(tmp_path):
    path = tmp_path / "recipe.py"
    path.write_text(
        "def get_config(arg='plain'):\n    if arg == 'bad':\n        raise ValueError('no bad')\n    return arg\n"
    )
    assert load_recipe(str(path)) == "plain"
    assert load_recipe(f"{path}:tiny") == "tiny"
    (tmp_path / "notes.md").write_text("# Notes")
    (tmp_path / "plain.py").write_text("def get_config():\n    return 1")
    (tmp_path / "empty.py").write_text("")
    for spec, says in (
        ("recipe.py:bad", "no bad"),
        ("recipes.py", r"there is no file .*recipes.py. Did you mean .*recipe.py"),
        ("notes.md", r"notes\.md is not a recipe: its name must end in \.py"),
        ("plain.py:tiny", "takes no argument; leave out ':tiny'"),
        ("empty.py", "defines no get_config"),
    ):
        with pytest.raises(ConfigError, match=says):
            load_recipe(f"{tmp_path}/{spec}")


@pytest.mark.parametrize(
    ("spec", "name"),
    [
        ("configs/reg_t5.py", "reg_t5"),
        ("reg_transformer:no_attributes,tiny", "reg_transformer-no_attributes-tiny"),
        ("configs/reg_t5.py:/models/my t5,machine=v5e:2x4", "reg_t5-models-my-t5-machine-v5e-2x4"),
    ],
)
def test_a_run_is_named_after_its_recipe_in_one_folder(spec, name):
    assert run_name(spec) == name
