"""What a new work directory takes over from another run's."""

import contextlib
import os
import shutil
from types import MappingProxyType

import pytest

from configs import emprl_t5, emprl_transformer, reg_t5
from empax.core.config import ConfigError
from empax.core.files import DataError, WorkDir, hash_json, read_json, read_jsonl, write_json, write_jsonl
from empax.core.inputs import Input
from empax.core.manifest import read_config, read_done, write_config, write_sealed
from empax.pipeline import workdirs
from empax.pipeline.plan import plain
from empax.pipeline.records import Records
from tests.damage import HOW, damage
from tests.plans import changed, run_by_files


@pytest.fixture
def config():
    return plain(emprl_transformer.get_config("tiny"))


def claim(files, config, *words, **more):
    workdirs.claim(files, run_by_files(config), *words, **more)


@pytest.fixture
def finished(config, tmp_path):
    """A run of `config` in which everything is done; its stages hold nothing but their names."""
    files = WorkDir(tmp_path / "finished")
    claim(files, config, command="the first")
    finish(files, config)
    return files


def finish(files, config, inputs=MappingProxyType({})):
    """Has every stage that is not done write a few files."""
    records = Records(files, run_by_files(config), inputs)
    for name in config["run"]:
        if files.done(name).exists():
            continue
        records.begin(name)
        write_json(files.stage(name) / "deep" / "name.json", name)
        write_json(files.tensorboard(name) / "events.json", name)
        rows = list(read_jsonl(files.metrics)) if files.metrics.exists() else []
        write_jsonl(files.metrics, [*rows, {"stage": name, "step": 1}])
        records.finish(name, {"seconds": 1.0})


def taken(config, finished, tmp_path):
    files = WorkDir(tmp_path / "new")
    claim(files, config, finished.root)
    return files, read_json(files.provenance)["reused"]["stages"]


def test_stages_up_to_the_first_difference_are_taken(config, finished, tmp_path):
    other = changed(config, {"ppo.kl": {"coefficient": 0.0, "controller": "fixed"}})
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
    finish(files, other)
    Records(files, run_by_files(other)).check()
    write_json(files.stage("generator") / "deep" / "name.json", "mine")
    assert read_json(finished.stage("generator") / "deep" / "name.json") == "generator"


def test_evaluations_are_made_anew_and_unfinished_stages_here(config, finished, tmp_path):
    finished.done("ppo").unlink()
    _, names = taken(config, finished, tmp_path)
    assert names[-1] == "generator"
    finish(finished, config)
    _, names = taken(config, finished, tmp_path / "again")
    assert names[-1] == "ppo"


def test_judges_with_a_seed_of_their_own_serve_runs_of_every_seed(config, finished, tmp_path):
    names = taken(config | {"seed": 7}, finished, tmp_path)[1]
    assert names == ["prepare", "identifiers", "assess"]
    del config["identifiers"]["seed"]
    write_config(finished, config, read_json(finished.provenance))
    assert taken(config | {"seed": 7}, finished, tmp_path / "again")[1] == ["prepare"]
    assert taken(config, finished, tmp_path / "same")[1][-1] == "ppo"


@pytest.mark.parametrize(
    ("section", "name", "value", "others"),
    [("emprl", "layout.max_target_tokens", 7, ["prepare"]), ("prepare", "tokenizer", {"vocab_size": 99}, [])],
)
def test_judges_on_a_pretrained_encoder_build_on_nothing_else(config, finished, tmp_path, section, name, value, others):
    """What reads the models' settings ends with them; what was judged by a judge that differs, with the judge."""
    other = changed(config, {f"{section}.{name}": value})
    for one in (config, other):
        one["identifiers"]["encoder"] = {"pretrained": "minilm"}
    write_config(finished, config, read_json(finished.provenance))
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
    other = changed(config, {f"{section}.{name}": value})
    with pytest.raises(ConfigError, match=rf"can be reused \(config.{section}.{name}.* there, .* here\)"):
        taken(other, finished, tmp_path)
    assert not (tmp_path / "new").exists()


def test_a_run_that_no_longer_says_what_made_it_serves_all_the_same(config, finished, tmp_path):
    finished.provenance.write_text("null")
    files, _ = taken(config, finished, tmp_path)
    assert read_json(files.provenance)["reused"]["commit"] == ""


def test_where_data_lies_is_no_difference_and_a_folder_without_a_run_is_named(config, finished, tmp_path):
    other = changed(config, {"data.dir": "elsewhere"})
    assert taken(other, finished, tmp_path)[1]
    with pytest.raises(ConfigError, match="holds no run to reuse; give"):
        claim(WorkDir(tmp_path / "another"), config, tmp_path / "nowhere")


def test_a_damaged_stage_is_not_taken(config, finished, tmp_path):
    damage(finished.stage("generator") / "deep" / "name.json", "flipped")
    with pytest.raises(DataError, match=r"generator/deep/name\.json has changed.*--redo=generator"):
        taken(config, finished, tmp_path)


@pytest.mark.parametrize("how", HOW)
def test_a_lost_config_is_written_anew_by_the_command_that_made_the_stages_alone(config, finished, how, caplog):
    before = finished.config.read_bytes()
    damage(finished.config, how)
    other = config | {"seed": 7}
    advice = r"config\.json is gone or damaged, and .*generator was made with other settings .*--redo=prepare"
    with pytest.raises(ConfigError, match=advice):
        claim(finished, other)
    claim(finished, config)
    assert "It is rewritten" in caplog.text
    assert finished.config.read_bytes() == before
    damage(finished.config, how)
    claim(finished, other, redo=config["run"][:1])  # the advice works
    assert read_json(finished.config) == other
    assert not any(finished.stage(name).exists() for name in config["run"])


def test_a_stage_that_does_not_say_what_it_is_adopts_no_config(config, finished):
    finished.config.unlink()
    for name in config["run"]:
        finished.done(name).unlink()
    claim(finished, config)  # BEGUN says it too
    finished.config.unlink()
    finished.begun("ppo").unlink()
    with pytest.raises(ConfigError, match=r"ppo does not record its settings"):
        claim(finished, config)


def test_a_run_of_a_version_with_other_names_is_refused_in_its_place_and_kept_by_reuse(config, finished, tmp_path):
    identities = {}
    for name in config["run"]:
        done = read_done(finished.stage(name))
        done |= {"settings": f"older {name}", "built_on": {one: identities[one] for one in done["built_on"]}}
        identities[name] = hash_json([done["settings"], done["result"]])
        write_sealed(finished.done(name), done)
    before = [finished.done(name).read_bytes() for name in config["run"]]
    with pytest.raises(DataError, match=f"another name. In .*, a new --workdir with --reuse={finished.root} keeps it"):
        Records(finished, run_by_files(config)).check()
    with pytest.raises(DataError, match="another name"):
        claim(finished, config, redo=["report"])  # and nothing is removed for it
    files, names = taken(config, finished, tmp_path)
    assert names[-1] == "ppo"
    Records(files, run_by_files(config)).check()
    assert [finished.done(name).read_bytes() for name in config["run"]] == before


def test_another_config_is_refused_with_advice_that_works(config, finished, tmp_path):
    other = changed(config, {"ppo.steps": 3})
    with pytest.raises(ConfigError) as refused:
        claim(finished, other)
    message = str(refused.value)
    assert "config.ppo.steps: 4 there, 3 here" in message
    assert f"--reuse={finished.root} to start with its prepare, " in message
    assert "--redo=ppo" in message
    assert taken(other, finished, tmp_path)[1][-1] == "generator"
    claim(finished, other, redo=["ppo"], command="the second")
    assert read_json(finished.config) == other
    assert not finished.stage("ppo").exists()
    described = read_json(finished.provenance)
    assert (described["command"], [one["command"] for one in described["earlier"]]) == ("the second", ["the first"])
    claim(finished, config, redo=["ppo"], command="the third")
    assert [one["command"] for one in read_json(finished.provenance)["earlier"]] == ["the first", "the second"]
    claim(finished, other, redo=["ppo"])
    assert finished.done("generator").exists()
    finish(finished, other)
    Records(finished, run_by_files(other)).check()


def test_settings_of_what_has_not_begun_may_change(config, finished):
    other = changed(config, {"ppo.steps": 3})
    claim(finished, config, redo=["ppo"])
    claim(finished, other, command="the second")
    assert read_json(finished.config) == other
    assert read_json(finished.provenance)["command"] == "the second"
    assert finished.done("generator").exists()


def test_a_last_stage_may_be_left_out(config, finished):
    *run, last = config["run"]
    claim(finished, {name: section for name, section in config.items() if name != last} | {"run": run})
    assert all(finished.done(name).exists() for name in config["run"])


def test_redo_makes_what_it_names_and_all_that_follows_anew_and_nothing_before(config, finished):
    times = {name: finished.done(name).stat().st_mtime_ns for name in config["run"]}
    write_json(finished.root / "report.json", {})
    claim(finished, config, redo=["report", "generator"])
    place = config["run"].index("generator")
    for name in config["run"][:place]:
        assert finished.done(name).stat().st_mtime_ns == times[name]
    assert not any(finished.stage(name).exists() for name in config["run"][place:])
    assert not any(finished.tensorboard(name).exists() for name in config["run"][place:])
    assert [row["stage"] for row in read_jsonl(finished.metrics)] == config["run"][:place]
    with pytest.raises(ConfigError, match=r"--redo=generatr: no such stage; config\.run has prepare, "):
        claim(finished, config, redo=["generatr"])


def test_what_is_redone_is_described_by_the_process_that_redoes_it(config, finished, tmp_path):
    claim(finished, config, redo=["report"], command="the page alone")
    assert read_json(finished.provenance)["command"] == "the first"
    claim(finished, config, redo=["ppo"], command="the second")
    described = read_json(finished.provenance)
    assert (described["command"], [one["command"] for one in described["earlier"]]) == ("the second", ["the first"])
    finish(finished, config)
    files, stages = taken(config, finished, tmp_path)
    assert "generator" in stages
    claim(files, config, redo=["generator"])
    assert read_json(files.provenance)["reused"]["stages"] == stages[: stages.index("generator")]
    claim(files, config, redo=["prepare"])
    assert "reused" not in read_json(files.provenance)


def test_a_redo_that_is_killed_leaves_no_curve_of_what_it_removes(config, finished, monkeypatch):
    rename = os.rename

    def killed(*paths):
        rename(*paths)
        raise KeyboardInterrupt

    monkeypatch.setattr(workdirs.os, "rename", killed)
    with pytest.raises(KeyboardInterrupt):
        claim(finished, config, redo=["report"])
    assert not finished.stage("report").exists()
    assert not finished.tensorboard("report").exists()


@pytest.fixture
def fine_tuned(tmp_path):
    """A finished run of REG on a T5: its stages hold nothing but their names."""
    config = plain(reg_t5.get_config("tiny"))
    files = WorkDir(tmp_path / "reg")
    claim(files, config)
    finish(files, config)
    return files


@pytest.mark.parametrize("other", ["reg_t5 no_retrieval", "reg_t5 sft", "emprl_t5", "emprl_t5 sft"])
def test_fine_tuning_is_shared_by_runs_that_decode_otherwise_and_by_other_systems(fine_tuned, tmp_path, other):
    recipe, _, form = other.partition(" ")
    config = plain({"reg_t5": reg_t5, "emprl_t5": emprl_t5}[recipe].get_config(f"tiny,{form}"))
    assert {"prepare", "generator"} <= set(taken(config, fine_tuned, tmp_path)[1])
    config[config["system"]]["generator"]["dropout"] = 0.3
    assert taken(config, fine_tuned, tmp_path / "again")[1] == ["prepare"]


def test_what_needs_the_system_is_not_taken_from_another_one(fine_tuned, tmp_path):
    config = plain(reg_t5.get_config("tiny"))
    assert taken(config, fine_tuned, tmp_path)[1][-1] == "joint"
    config["reg"]["exemplars"] = "response"
    assert taken(config, fine_tuned, tmp_path / "again")[1][-1] == "index"  # which no layout changes


def corpus(path, contents):
    return {"prepare": {"the corpus": Input(str(path), {"train.jsonl": contents})}}


@pytest.fixture
def made_of_a(config, tmp_path):
    """A finished run that says which corpus it was made of."""
    files = WorkDir(tmp_path / "made")
    claim(files, config, inputs=corpus("A", "a"))
    finish(files, config, corpus("A", "a"))
    return files


@pytest.mark.parametrize("place", ["A", "B"])
def test_another_corpus_is_refused_by_name_in_the_same_work_directory(config, made_of_a, place, tmp_path):
    before = made_of_a.config.read_bytes()
    said = {"A": "A has changed", "B": "B is not what A was"}[place]
    message = rf"prepare was made from other files: the corpus: {said} \(train\.jsonl\)\. .*--redo=prepare"
    with pytest.raises(ConfigError, match=message):
        claim(made_of_a, config, inputs=corpus(place, "b"))
    assert made_of_a.config.read_bytes() == before
    claim(made_of_a, config, inputs=corpus("B", "a"))  # the same, elsewhere
    claim(WorkDir(tmp_path / "another"), config, inputs=corpus(place, "b"))
    claim(made_of_a, config, inputs=corpus(place, "b"), redo=["prepare"])
    assert not made_of_a.stage("generator").exists()


def test_another_corpus_ends_what_is_taken_over(config, made_of_a, tmp_path):
    message = r"no stage of that run can be reused \(its prepare was made from other files: the corpus: B is not what A"
    with pytest.raises(ConfigError, match=message):
        claim(WorkDir(tmp_path / "new"), config, made_of_a.root, inputs=corpus("B", "b"))
    assert not (tmp_path / "new").exists()
    files = WorkDir(tmp_path / "new")
    claim(files, config, made_of_a.root, inputs=corpus("B", "a"))
    assert "ppo" in read_json(files.provenance)["reused"]["stages"]
    with pytest.raises(ConfigError, match="other files"):  # what is taken over says it still
        claim(files, config, inputs=corpus("A", "b"))


def test_a_stage_that_has_begun_does_not_go_on_from_another_corpus(config, made_of_a):
    for name in config["run"][1:]:
        shutil.rmtree(made_of_a.stage(name))
    made_of_a.done("prepare").unlink()
    with pytest.raises(ConfigError, match="other files"):
        claim(made_of_a, config, inputs=corpus("A", "b"))
    claim(made_of_a, config, inputs=corpus("A", "a"))
    finish(made_of_a, config, corpus("A", "b"))  # whoever claims has looked; what it began with counts
    claim(made_of_a, config, inputs=corpus("A", "a"))


def test_a_corpus_that_was_put_away_is_not_asked_for(config, made_of_a, caplog):
    claim(made_of_a, config, inputs={})
    assert "prepare: the corpus (A) no longer exists, so it was not compared." in caplog.text


def test_the_folder_of_a_model_is_no_run(tmp_path):
    write_json(tmp_path / "config.json", {"model_type": "gpt2", "n_embd": 32})
    with pytest.raises(DataError, match=r"config\.json is not a run's config: it lacks run or system"):
        read_config(WorkDir(tmp_path))
