"""ReflectDiffu's recipe in small: annotator, intents, the joint stage with rewards and diffusion, and who answers."""

import gzip
import json
import re
import shutil

import jax
import numpy as np
import pytest

import empax
from configs.reflectdiffu import ABLATIONS
from empax.core.config import ConfigError
from empax.core.files import WorkDir, read_json, read_jsonl
from empax.data.store import load_instances
from empax.data.tokenizer_folders import load_tokenizer
from empax.parts.attributes import load_identifiers
from empax.parts.attributes.identifier import empathy_reward
from empax.systems.reflectdiffu.labels import INTENTS
from empax.systems.reflectdiffu.reinforced import ReplyEmpathy
from empax.training.checkpoint import load_params
from tests.end_to_end.promises import assert_a_killed_run_ends_the_same
from tests.plans import context_of

RECIPE = "configs/reflectdiffu.py"
TIMING = {"seconds", "examples_per_second"}
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def whole(recipe, tmp_path_factory):
    folder = tmp_path_factory.mktemp("reflectdiffu") / "run"
    recipe(folder, "--check", config=f"{RECIPE}:tiny")
    return WorkDir(folder)


def test_predictions_tell_reasons_and_intents_and_a_report_scores_them(whole):
    rows = list(read_jsonl(whole.predictions))
    assert len(rows) == 62
    assert all({"intent_first", "intent_second", "intent_prediction", "reasons"} <= set(row["notes"]) for row in rows)
    assert any("intent" in row["notes"] for row in rows)
    assert all(row["notes"]["intent_prediction"] in INTENTS for row in rows)
    text = gzip.decompress(whole.outputs.read_bytes()).decode()
    assert not any(word in text for row in rows for word in row["context"])
    report = read_json(whole.root / "report.json")
    assert 0 <= report["metrics"]["intent_accuracy"]["value"] <= 100
    assert read_json(whole.stage("generator") / "intents.json")["covered_by_commonest"]["3"] > 0
    assert set(read_json(whole.stage("reasons") / "reasons.json")) == {"data", "held_out", "lexicon"}


def test_the_joint_stage_logs_rewards_corrections_and_diffusion(whole):
    logged = [row for row in read_jsonl(whole.metrics) if row["stage"] == "generator"]
    wanted = {"reward", "baseline", "policy_entropy", "noise_error", "latent_kl", "corrected", "mimicry_gain"}
    assert wanted <= set(json.dumps(logged).split('"'))


def test_it_chats_and_shows_what_it_thought(whole, command):
    said = command("-m", "empax.chat", f"--workdir={whole.root}", input="I lost my dog.\n")
    assert said.returncode == 0, said.stderr
    (intents,) = [line for line in said.stdout.split("\n") if "intents: " in line]
    assert all(name in INTENTS for name in intents.split("intents: ")[1].split(" -> "))
    reply = empax.Session.load(whole.root).reply(["I lost my dog."])
    assert reply.notes["intent_prediction"] in INTENTS
    with pytest.raises(ConfigError, match=r"trains .*reflectdiffu\.reasons.*Session\.load answers"):
        empax.load(whole.root)


def history(files):
    return [{k: v for k, v in row.items() if k not in TIMING} for row in read_jsonl(files.metrics)]


def test_a_run_killed_in_the_joint_stage_ends_with_the_same_bits(whole, recipe, tmp_path):
    """With rewards and diffusion: parameters, the rewards' running mean and all metrics.

    The interrupted process saves, so that the killed one has gone on from a checkpoint between two evaluations.
    """
    files = WorkDir(tmp_path / "run")
    shutil.copytree(whole.root, files.root)
    stops = (("generator:3:SIGINT", 130, ("--redo=generator",)), ("generator:4:SIGKILL", -9, ()))
    for stop, code, flags in stops:
        recipe(files.root, f"--stop={stop}", *flags, config=f"{RECIPE}:tiny", code=code)
        assert not files.done("generator").exists()
    resumed = recipe(files.root, config=f"{RECIPE}:tiny")
    assert re.search(r"parameters, from step [34]\.", resumed.stderr)
    for which in ("best", "last"):
        jax.tree.map(np.testing.assert_array_equal, *(load_params(f.stage("generator"), which) for f in (whole, files)))
    assert history(files) == history(whole)  # "baseline" is of the memory
    assert files.predictions.read_bytes() == whole.predictions.read_bytes()


@pytest.fixture(scope="module")
def rewarded(recipe, whole, tmp_path_factory):
    folder = tmp_path_factory.mktemp("rewarded") / "run"
    recipe(folder, f"--reuse={whole.root}", config=f"{RECIPE}:empathy_reward,tiny")
    return WorkDir(folder)


def test_a_run_with_emprls_reward_that_was_killed_ends_with_the_same_bits(rewarded, recipe, tmp_path):
    config = f"{RECIPE}:empathy_reward,tiny"
    assert_a_killed_run_ends_the_same(rewarded.root, tmp_path / "run", recipe, config, "generator", "generator")


def test_emprls_reward_teaches_its_policy(rewarded, tmp_path):
    """By its recipe alone; and the reward of a reply is EmpRL's of the same text."""
    files = rewarded
    logged = [row for row in read_jsonl(files.metrics) if row["stage"] == "generator" and "reward" in row]
    assert logged
    assert all(0 < row["reward"] <= 1 and row["reward_spread"] > 0 for row in logged)
    assert "empathy_f1" in read_json(files.root / "report.json")["metrics"]

    run = context_of(files.root, "generator")
    instances, tokenizer = load_instances(run, "train")[:3], load_tokenizer(files.tokenizer)
    judges = load_identifiers(run, ("identifiers",))
    levels = judges.gold(instances, tmp_path)
    reward = ReplyEmpathy(judges, tokenizer, instances, [["zorblax"]] * 3, levels)
    said = ["i am so sorry", "how did it go", "zorblax"]
    replies = np.full((4, 8), tokenizer.eos_id)
    for row, text in enumerate(said[:2]):
        ids = tokenizer.encode(text)
        replies[row, : len(ids)] = ids
    replies[2, 0] = tokenizer.vocab_size  # a slot
    contexts = [i.context for i in instances]
    gold = judges(contexts, [i.response for i in instances]).argmax(axis=2)
    found = judges(contexts, [tokenizer.decode(tokenizer.encode(text)) for text in said[:2]] + said[2:])
    rewards = reward(np.array([0, 1, 2, -1]), replies)
    np.testing.assert_allclose(rewards, [*empathy_reward(found, gold), 0.0], rtol=1e-5)


@pytest.mark.parametrize("form", [*ABLATIONS, "plain", "eq10", "batch_majority,eq5,eq7,table_1"])
def test_every_form_runs(form, whole, recipe, tmp_path):
    recipe(tmp_path, f"--reuse={whole.root}", config=f"{RECIPE}:{form},tiny")
    row = next(iter(read_jsonl(tmp_path / "predictions.jsonl")))
    assert ("reasons" in row["notes"]) == (form not in ("no_reasons", "plain"))
    assert ("intent_second" in row["notes"]) == (form not in ("no_second_intent", "plain", "constant_second"))
