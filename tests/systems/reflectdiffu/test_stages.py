"""The stages: rows of contexts, what is refused before any work, plans."""

import re
from types import SimpleNamespace

import numpy as np
import pytest

from configs import reflectdiffu
from empax.core.config import ConfigError
from empax.core.files import DataError, WorkDir, write_json
from empax.core.system import AnswerOptions, RunContext
from empax.core.types import EMOTIONS, Instance
from empax.data.bpe import train_bpe
from empax.data.features import SPECIAL_TOKENS
from empax.decoding.settings import DecodeSettings
from empax.pipeline import run
from empax.pipeline.plan import make_plan, plain
from empax.planning.sketches import sketch_stage
from empax.systems.reflectdiffu import stages
from empax.systems.reflectdiffu.diffusion import Schedule
from empax.systems.reflectdiffu.examples import NO_PRIOR, ReflectExamples, polarities
from empax.systems.reflectdiffu.labels import INTENTS, TABLE_1
from empax.systems.reflectdiffu.settings import GeneratorTaskSettings, ReflectSettings
from tests.plans import changed

CONTEXT = ("My dog died, it is horrible.", "Oh no!", "I miss him.")
LENGTHS = ReflectSettings(max_context_tokens=40, max_piece_tokens=40, max_target_tokens=10)


@pytest.fixture(scope="module")
def tokenizers():
    texts = [" ".join(CONTEXT), "The dog was mine. I miss my dog terribly."]
    sizes = (290, 310)
    return [train_bpe(texts, vocab_size=n, lowercase=True, special_tokens=SPECIAL_TOKENS) for n in sizes]


def test_rows_know_their_words_pieces_and_labels(tokenizers):
    words, pieces = tokenizers
    instances = [Instance("a#4", CONTEXT, "I see.", "sad"), Instance("b#2", ("We won, great!",), "Well done!", "")]
    prior = np.stack([NO_PRIOR, np.eye(len(INTENTS), dtype=np.float32)[2]])
    examples = ReflectExamples(instances, words, LENGTHS, prior, {"a#4": "consoling"}, piece_tokenizer=pieces)
    batch = examples.collate(np.array([1, 0, -1]), 40, np.random.default_rng(0))
    np.testing.assert_array_equal(batch.valid, [True, True, False])
    np.testing.assert_array_equal(batch.emotion, [-1, EMOTIONS.index("sad"), -1])
    np.testing.assert_array_equal(batch.intent, [-1, INTENTS.index("consoling"), -1])
    np.testing.assert_array_equal(batch.polarity[:2], [1, -1])
    np.testing.assert_array_equal(batch.turns[:2], [1, 3])
    np.testing.assert_array_equal(batch.prior[0], prior[1])
    assert batch.source[1, 0] == words.cls_id
    roles = [words.token_id(t) for t in ("<speaker>", "<listener>", "<speaker>")]
    assert [i for i in batch.source[1] if i in roles] == roles
    assert (batch.place[1][batch.source_mask[1]] >= 0).sum() >= len(words.encode(" ".join(CONTEXT))) - 6
    spoken = words.encode(CONTEXT[0])
    first = batch.place[1][2 : 2 + len(spoken)]
    assert batch.told[1][first].all()
    assert (np.diff(first) >= 0).all()
    assert batch.number[0] != batch.number[1]


def test_polarity_is_of_the_whole_context():
    assert polarities([("I hate it.",), ("I love it.",), ("It is a chair.",)]).tolist() == [-1, 1, 0]


def test_forms_change_the_joint_stage_and_go_together():
    usual = reflectdiffu.get_config()
    both = reflectdiffu.get_config("table_1,no_reasons")
    assert both.run == tuple(name for name in usual.run if name != "reasons")
    other = {name for name, value in both.generator.items() if value != usual.generator[name]}
    assert other == {"actions", "reasons"}
    assert reflectdiffu.get_config("machine=gpu").generator.steps == 6500
    for form, changes in reflectdiffu.FORMS.items():
        config = reflectdiffu.get_config(form)
        assert all(usual.generator.get(name) != value == config.generator[name] for name, value in changes.items())
        assert make_plan(plain(config)).stages["generator"].settings


def tiny(*words, changes=()):
    config = plain(reflectdiffu.get_config(",".join([*words, "tiny"])))
    return changed(config, {"mesh.data": 1, **dict(changes)})


REFUSED = {
    "config.generator.reasons = 'intents'": {"generator.reasons": "intents"},
    "config.generator.intents = 'nowhere'": {"generator.intents": "nowhere"},
    "so the policy cannot learn with it; set it to 0, or config.generator.policy_weight to 0": {
        "reflectdiffu.model": {"dropout": 0.1}
    },
    "config.generator.judges = 'intents'": {"generator.reward": "empathy", "generator.judges": ["intents"]},
    "copies; set decoding.encoder_no_repeat_ngram to 0": {"evaluate.decoding": {"encoder_no_repeat_ngram": 3}},
    "has no response intents": {"data.name": "jsonl"},
    "are each other's negatives": {"generator.accumulate": 2},
    "buckets end at 20": {"reasons.buckets": [20]},
    "ReflectDiffu marks who speaks": {"prepare.tokenizer": {"tags": False, "vocab_size": 600}},
    "holds no RECCON": {"reasons.data": "reccon", "data.dir": "configs"},
    "must hold train.jsonl": {"reasons.data": "file", "reasons.spans": "configs"},
}


@pytest.mark.parametrize("said", REFUSED)
def test_what_cannot_work_is_refused_before_any_work(said, tmp_path):
    problems = list(run.find_problems(make_plan(tiny(changes=REFUSED[said])), WorkDir(tmp_path)))
    assert any(said in str(problem) for problem in problems), problems
    assert "config.config." not in "".join(map(str, problems))


def test_only_training_needs_the_word_vectors(tmp_path):
    plan, files = make_plan(tiny(changes={"reflectdiffu.model": {"vectors": "spacy-md"}})), WorkDir(tmp_path)
    stages.check_system(RunContext(files, plan, "evaluate"))
    with pytest.raises(ConfigError, match="'spacy-md' is not a file"):
        stages.check_generator(plan.stages["generator"].settings, RunContext(files, plan, "generator"))


WRONG = [
    ({"state_time": 1001}, "state_time = 1001 must be a time of the schedule, from 1 to 1000"),
    ({"num_actions": 1}, "num_actions"),
    ({"num_actions": 4, "actions": "table_1"}, "num_actions = 4, but Table 1 has three intents"),
    ({"reward": "empathy"}, "judges = () goes with reward = 'empathy'"),
    ({"reward": "empathy", "judges": ("intents",), "intent_start": False}, "needs intent_start = True"),
    ({"constant_second": True, "second_intent": False}, "needs second_intent = True"),
]


@pytest.mark.parametrize(("changes", "said"), WRONG)
def test_settings_that_cannot_be_are_refused(changes, said):
    with pytest.raises(ConfigError, match=re.escape(said)):
        GeneratorTaskSettings(**changes)


IDLE = [
    ("experts", "none", {"contrastive_weight": 0.5, "temperature": 0.5}),
    ("emotion_weight", 0.0, {"contrastive_weight": 0.5, "temperature": 0.5}),
    ("contrastive_weight", 0.0, {"temperature": 0.5}),
    ("second_intent", False, {"actions": "table_1", "num_actions": 4, "policy_weight": 0.0}),
    ("second_intent", False, {"first_weight": 0.0, "final_prior": False, "entropy_weight": 0.5, "reward": "alignment"}),
    ("constant_second", True, {"actions": "table_1", "num_actions": 4, "policy_weight": 0.0}),
    ("constant_second", True, {"entropy_weight": 0.5, "reward": "alignment"}),
    ("policy_weight", 0.0, {"entropy_weight": 0.5, "reward": "alignment"}),
    ("twice_weight", 0.0, {"policy_weight": 0.5, "first_weight": 0.0, "noise_error": False, "kl_weight": 1.0}),
    ("twice_weight", 0.0, {"entropy_weight": 0.5, "reward": "alignment"}),
    ("mimicry", False, {"restore": "printed", "state_time": 100}),
    ("mimicry", False, {"noise_error": False, "recognition": "noisy", "kl_weight": 1.0, "diffusion": Schedule(300)}),
    ("copying", False, {"slots": 5}),
]


@pytest.mark.parametrize(("setting", "value", "unread"), IDLE)
def test_settings_that_change_nothing_are_refused(setting, value, unread):
    GeneratorTaskSettings(**{setting: value})
    for name, other in unread.items():
        said = f"{name} = {other!r} changes nothing where {setting} = {value!r}; leave it out"
        with pytest.raises(ConfigError, match=re.escape(said)):
            GeneratorTaskSettings(**{setting: value, name: other})


def test_settings_of_the_shared_section_are_refused():
    with pytest.raises(ConfigError, match="encoder_no_repeat_ngram"):
        ReflectSettings(decoding=DecodeSettings(encoder_no_repeat_ngram=3))


@pytest.mark.parametrize(
    ("form", "idle"),
    [
        ("no_mimicry", {"noise_error", "recognition", "kl_weight"}),
        ("no_second_intent", {"policy_weight", "first_weight"}),
        ("constant_second", {"policy_weight"}),
    ],
)
def test_a_form_leaves_what_nothing_reads_beside_another(form, idle):
    """Whichever is named first; the rest of it is set."""
    usual = reflectdiffu.get_config().generator
    for forms in (f"{form},eq10", f"eq10,{form}"):
        config = reflectdiffu.get_config(forms)
        assert {name for name in reflectdiffu.FORMS["eq10"] if config.generator[name] == usual[name]} == idle
        make_plan(plain(config))
    make_plan(plain(reflectdiffu.get_config("no_prior,no_second_intent")))


def test_a_chat_reads_the_references_of_training_and_no_labels(tokenizers, tmp_path, monkeypatch):
    def absent(data):
        raise ConfigError("no labels")

    monkeypatch.setattr(stages, "load_intents", absent)
    monkeypatch.setattr(stages, "load_params", lambda folder, which: {})
    monkeypatch.setattr(stages, "run_tokenizer", lambda run, planned: tokenizers[0])
    files = WorkDir(tmp_path)
    write_json(files.stage("generator") / "intents.json", {"references": TABLE_1})
    plan = SimpleNamespace(data=None, options=SimpleNamespace(mesh=None))
    context = SimpleNamespace(files=files, plan=plan, shared_settings=lambda kind: kind())
    stage = GeneratorTaskSettings(reasons="", intents="")
    answerer = stages.answer_generator(stage, context, AnswerOptions("generator", ""))
    found = [tuple(INTENTS[i] for i in row) for row in answerer.task.references]
    assert found == [TABLE_1[emotion] for emotion in EMOTIONS]
    with pytest.raises(ConfigError, match="no labels"):  # an evaluation compares with them
        stages.answer_generator(stage, context, AnswerOptions("generator", "", (40,)))
    write_json(files.stage("generator") / "intents.json", {})
    with pytest.raises(DataError, match=r"by an older version, has no references\. .* --redo=generator"):
        stages.answer_generator(stage, context, AnswerOptions("generator", ""))


def test_without_the_loss_of_intents_nothing_is_reinforced(tmp_path):
    """So that dropout does not matter."""
    changes = REFUSED["so the policy cannot learn with it; set it to 0, or config.generator.policy_weight to 0"]
    plan = make_plan(tiny(changes={**changes, "generator.twice_weight": 0.0}))
    assert not list(run.find_problems(plan, WorkDir(tmp_path)))


@pytest.mark.slow
@pytest.mark.parametrize("form", ["", *reflectdiffu.FORMS])
def test_it_is_planned(form):
    plan = make_plan(tiny(*filter(None, [form])))
    found = sketch_stage(plan, plan.stages["generator"])
    assert ("contagion" in found.params) == (form not in ("no_reasons", "plain"))
    assert ("mimicry" in found.params) == (form not in ("no_mimicry", "plain"))
