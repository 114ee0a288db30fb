"""What a new work directory takes over from another run's."""

import contextlib
import copy

import pytest

from configs import emprl_t5, emprl_transformer, reg_t5
from empax.core.config import ConfigError
from empax.core.files import WorkDir, read_json, read_jsonl, write_json, write_jsonl
from empax.pipeline import run
from empax.pipeline.workdirs import claim


@pytest.fixture
def config():
    return run.plain(emprl_transformer.get_config("tiny"))


@pytest.fixture
def finished(config, tmp_path):
    """A run of `config` in which everything is done; its stages hold nothing but their names."""
    files = WorkDir(tmp_path / "finished")
    claim(files, config)
    for name in config["run"]:
        write_json(files.stage(name) / "deep" / "name.json", name)
        write_json(files.tensorboard(name) / "events.json", name)
        write_json(files.done(name), {"seconds": 1.0})
    write_jsonl(files.metrics, [{"stage": name, "step": 1} for name in config["run"]])
    return files


def taken(config, finished, tmp_path):
    files = WorkDir(tmp_path / "new")
    claim(files, config, finished.root)
    return files, read_json(files.run)["reused"]["stages"]


def test_stages_up_to_the_first_difference_are_taken(config, finished, tmp_path):
    other = copy.deepcopy(config)
    other["ppo"]["kl"] = {"coefficient": 0.0, "controller": "fixed"}
    files, names = taken(other, finished, tmp_path)
    assert names == config["run"][: config["run"].index("ppo")]
    assert {"prepare", "generator", "identifiers"} <= set(names)
    for name in names:
        assert files.done(name).exists()
        assert read_json(files.stage(name) / "deep" / "name.json") == name
        assert read_json(files.tensorboard(name) / "events.json") == name
    assert [row["stage"] for row in read_jsonl(files.metrics)] == names
    assert not files.stage("ppo").exists()
    assert read_json(files.config) == other
    claim(files, other, finished.root)  # goes on
    write_json(files.stage("generator") / "deep" / "name.json", "mine")
    assert read_json(finished.stage("generator") / "deep" / "name.json") == "generator"


def test_evaluations_are_made_anew_and_unfinished_stages_here(config, finished, tmp_path):
    finished.done("ppo").unlink()
    _, names = taken(config, finished, tmp_path)
    assert names[-1] == "generator"
    write_json(finished.done("ppo"), {})
    _, names = taken(config, finished, tmp_path / "again")
    assert names[-1] == "ppo"


def test_judges_with_a_seed_of_their_own_serve_runs_of_every_seed(config, finished, tmp_path):
    names = taken(config | {"seed": 7}, finished, tmp_path)[1]
    assert names == ["prepare", "identifiers", "assess"]
    del config["identifiers"]["seed"]
    write_json(finished.config, config)
    assert taken(config | {"seed": 7}, finished, tmp_path / "again")[1] == ["prepare"]
    assert taken(config, finished, tmp_path / "same")[1][-1] == "ppo"


@pytest.mark.parametrize(
    ("section", "name", "value", "others"),
    [("emprl", "passages", 5, ["prepare"]), ("prepare", "tokenizer", {"vocab_size": 99}, [])],
)
def test_judges_on_a_pretrained_encoder_build_on_nothing_else(config, finished, tmp_path, section, name, value, others):
    """What reads the models' settings ends with them; what was judged by a judge that differs, with the judge."""
    other = copy.deepcopy(config)
    other[section][name] = value
    for one in (config, other):
        one["identifiers"]["encoder"] = {"pretrained": "minilm"}
    write_json(finished.config, config)
    names = taken(other, finished, tmp_path)[1]
    assert names == [*others, "identifiers", *(["assess"] if others else [])]
    other["identifiers"]["steps"] = 1
    with pytest.raises(ConfigError) if not others else contextlib.nullcontext():
        assert taken(other, finished, tmp_path / "again")[1] == others


@pytest.mark.parametrize(
    ("section", "name", "value"),
    [("data", "limit", 5), ("prepare", "tokenizer", {"vocab_size": 99})],
)
def test_without_a_common_beginning_there_is_nothing_to_use(config, finished, tmp_path, section, name, value):
    other = copy.deepcopy(config)
    other[section][name] = value
    with pytest.raises(
        ConfigError, match=rf"no stage of that run can be used \(config.{section}.{name}.* there, .* here\)"
    ):
        taken(other, finished, tmp_path)
    assert not (tmp_path / "new").exists()


def test_where_data_lies_is_no_difference_and_a_folder_without_a_run_is_named(config, finished, tmp_path):
    other = copy.deepcopy(config)
    other["data"]["dir"] = "elsewhere"
    assert taken(other, finished, tmp_path)[1]
    with pytest.raises(ConfigError, match="there is no run in it"):
        claim(WorkDir(tmp_path / "another"), config, tmp_path / "nowhere")


@pytest.fixture
def fine_tuned(tmp_path):
    """A finished run of REG on a T5: its stages hold nothing but their names."""
    config = run.plain(reg_t5.get_config("tiny"))
    files = WorkDir(tmp_path / "reg")
    claim(files, config)
    for name in config["run"]:
        write_json(files.stage(name) / "name.json", name)
        write_json(files.done(name), {})
    return files


@pytest.mark.parametrize("other", ["reg_t5 no_retrieval", "reg_t5 sft", "emprl_t5", "emprl_t5 sft"])
def test_fine_tuning_is_shared_by_runs_that_decode_otherwise_and_by_other_systems(fine_tuned, tmp_path, other):
    recipe, _, form = other.partition(" ")
    config = run.plain({"reg_t5": reg_t5, "emprl_t5": emprl_t5}[recipe].get_config(f"tiny,{form}"))
    assert {"prepare", "generator"} <= set(taken(config, fine_tuned, tmp_path)[1])
    config[config["system"]]["generator"]["dropout"] = 0.3
    assert taken(config, fine_tuned, tmp_path / "again")[1] == ["prepare"]


def test_what_needs_the_system_is_not_taken_from_another_one(fine_tuned, tmp_path):
    config = run.plain(reg_t5.get_config("tiny"))
    assert taken(config, fine_tuned, tmp_path)[1][-1] == "joint"
    config["reg"]["decoding"]["max_tokens"] = 3
    assert taken(config, fine_tuned, tmp_path / "again")[1][-1] == "annotate"
