"""What is known to be wrong before any work is told before any work, and the corrected command is accepted."""

import dataclasses
import json
import re
import sys
import types

import pytest

from configs import (
    classic,
    comet_t5,
    empathy_identifiers,
    emprl_transformer,
    lempex,
    nec,
    reflectdiffu,
    reg_llm,
    reg_transformer,
)
from empax.core.config import ConfigError
from empax.core.files import DataError, WorkDir
from empax.core.system import RunContext
from empax.core.types import EMOTIONS, MECHANISMS
from empax.data import empathetic_dialogues, epitome, sample
from empax.data.store import load_instances, planned_instances
from empax.pipeline import evaluate, prepare, run
from empax.pipeline.plan import make_plan, plain
from tests.data.test_epitome import write
from tests.end_to_end.conftest import write_model
from tests.own_corpus import HEADER, archive_of, write_own_corpus, write_rows
from tests.plans import changed

pytestmark = pytest.mark.usefixtures("no_data_dir")


@pytest.fixture(scope="module")
def reg():
    return plain(reg_transformer.get_config("tiny"))


@pytest.fixture(scope="module")
def emprl():
    config = plain(emprl_transformer.get_config("tiny"))
    config["mesh"]["data"] = 1
    return config


@pytest.fixture
def refused(monkeypatch):
    """What a run says, which makes nothing."""

    def refuse(config, workdir):
        with monkeypatch.context() as patched:
            patched.setattr(run, "claim", lambda *_, **__: pytest.fail("work has begun"))
            with pytest.raises((ConfigError, DataError)) as caught:
                run.run(config, workdir)
        assert not workdir.exists()
        return str(caught.value)

    return refuse


COUNTING = {"method": "sample", "num_samples": 2, "rerank": "consensus", "rerank_exemplars": 1.0}
REWARD = {"kind": "text"}
REG = {
    "epitome": ({"attributes.data": "epitome"}, r"EPITOME is not downloaded automatically: set --config\.data\.dir"),
    "corpus": ({"data.name": "empathetic_dialogues", "data.dir": "nowhere"}, "holds no EmpatheticDialogues"),
    "own corpus": ({"data.name": "jsonl", "data.dir": "nowhere"}, r"'nowhere' does not exist: it holds no train"),
    "tags": ({"prepare.tokenizer": {"pretrained": "minilm", "tags": False}},
        r"lacks <sep>, .*prepare\.tokenizer\.tags = True"),
    "tokenizer": ({"prepare.tokenizer": {"pretrained": "/nowhere"}}, "there is no such folder"),
    "classifier": ({"annotate.classifiers": ["generator"]},
        r"config\.annotate\.classifiers = 'generator': that stage trains 'reg\.generator'.* \(there are: attributes\)"),
    "mechanisms": ({"attributes.mechanisms": ["exploration"]}, "lacks a classifier of emotional_reaction, interpret"),
    "index of another kind": ({"exemplars.index": "annotate"}, r"that stage is of kind 'annotate'.*are: index\)"),
    "no such stage": ({"joint.generator": "g1"},
        r"config\.joint\.generator = 'g1': config\.run has no such stage; name .* before this one \(there are: "),
    "stage of another task": ({"retriever.generator": "emotions"}, r"that stage trains 'reg\.emotions'"),
    "later stage": ({"index.encoder": "retriever"}, "does not come before this one"),
    "searched splits": ({"reindex.queries": {"train": 0}},
        r"config\.reindex\.queries lacks validation, .*; set it to the number of instances to search"),
    "turns of a chat": ({"reg.exemplars": "turns"},
        r"only a decoder-only generator reads exemplars as turns of a chat; set it to 'apart'"),
    "passages": ({"reg.passages": 9}, r"candidates = 4, but config\.exemplars takes 9 of a context; set it to at"),
    "candidates that nobody finds": ({"retriever.candidates": 5}, r"candidates = 4, but config\.retriever takes 5"),
    "candidates": ({"joint.candidates": 1}, r"config\.joint\.candidates = 1 must be at least passages = 2, or 0"),
    "passages of another encoder": ({"joint.passage_encoder": "trained"},
        r"config\.reindex\.encoder = 'retriever', but .* of 'joint'; set it to 'joint'"),
    "passages of an encoder that is not trained": ({"exemplars.passage_encoder": "trained"},
        r"passage_encoder = 'trained', but with retriever_weight = 0 no encoder is trained; set it to 'frozen'"),
    "nothing to refresh": ({"exemplars.refresh_every_steps": 1},
        r"config\.exemplars\.refresh_every_steps = 1, but with retriever_weight = 0 the retriever never changes"),
    "fewer rows than candidates": ({"index.filter": "gold_emotion", "index.searched": 3},
        r"searched = 3 rows are filtered, but candidates = 4 are wanted; set searched to at least as many"),
    "a loss that is 0": ({"retriever.best_metric": "loss", "retriever.distillation.emotion_weight": 0.0},
        r"config\.retriever\.best_metric = 'loss': no candidate is tried out on validation, .* set it to None"),
    "more than all": ({"joint.retriever_weight": 1.5}, r"retriever_weight = 1\.5 must lie in \[0, 1\]"),
    "frozen": (
        {"joint.passage_encoder": "frozen", "joint.retriever": "", "joint.index": "index", "evaluate.index": "index"},
        "index 'index' have no emotions"),
    "frozen passages of a retriever as pretrained": (
        {"retriever.passage_encoder": "frozen", "retriever.start_from": ""},
        r"index 'index' have no emotions.*; set config\.retriever\.start_from and config\.index\.encoder to the same"),
    "frozen passages of another encoder": ({"retriever.passage_encoder": "frozen", "reg.emotion_share": 0.0},
        r"config\.index\.encoder = '', but the queries of config\.retriever .* of 'emotions'"),
    "positions": ({"reg.retriever.pretrained": "", "reg.retriever.max_positions": 8},
        "but the model reads at most 8 tokens; set it to at most that"),
    "queries and buckets": ({"reg.layout.max_query_tokens": 128},
        r"max_query_tokens = 128 is more than the longest of config\.emotions\.buckets; set it to at most \d+, or add"),
    "long queries": (
        {"reg.layout.max_query_tokens": 300, "reg.retriever.pretrained": "", "reg.retriever.max_positions": 512},
        r"config\.reg\.layout\.max_query_tokens = 300 must be at most 256"),
    "buckets": ({"attributes.max_tokens": 99}, r"config\.attributes\.max_tokens = 99 .* set it to at most 16"),
    "contexts and buckets": ({"reg.layout.max_context_tokens": 77},
        r"config\.reg\.layout\.max_context_tokens = 77, with 4 tokens beside it, is more than the longest of config\."
        r"generator\.buckets, 80, which cuts contexts; set it to at most 76, or add 81 to the buckets"),
    "contexts and buckets of exemplars": ({"joint.buckets": (24,)},
        r"max_context_tokens = 32, with 4 tokens beside it, is more than the longest of config\.joint\.buckets, 24"),
    "contexts and buckets of trials": ({"retriever.buckets": (24,)},
        r"= 32, with 4 tokens beside it, is more than the longest of config\.retriever\.buckets, 24, which cuts cont"),
    "adapters": ({"reg.lora": {"rank": 2}}, r"config\.reg\.lora adapts a pretrained generator"),
    "model": ({"reg.retriever.pretrained": "./nowhere"}, "'./nowhere' is neither a folder nor"),
    "first token": ({"reg.decoding.first_token": 10**6}, r"reg\.decoding\.first_token names the token 1000000; it"),
    "ids of an evaluation": ({"evaluate.decoding": {"suppress_tokens": [10**6]}},
        r"config\.evaluate\.decoding\.suppress_tokens names the token 1000000; it must be below"),
    "options that the method does not read": (
        {"reg.decoding": {"method": "greedy", "temperature": 0.3, "num_beams": 2}},
        r"config\.reg\.decoding: num_beams = 2, temperature = 0\.3 would change nothing with method = 'greedy', rerank "
        r"= ''; set num_beams=4, temperature=1\.0, or another method"),
    "options that no re-ranking reads": (
        {"evaluate.decoding": {"method": "beam", "rerank_length": 2.0, "draw_beams": True, "top_p": 0.5}},
        r"config\.evaluate\.decoding: rerank_length = 2\.0 would change nothing with method = 'beam', rerank = ''; set "
        r"rerank_length=0\.0, or another method"),
    "passes over nobody's answers": ({"generator.epochs": 3},
        r"config\.generator: epochs = 3 and minibatches = 1 repeat the updates of a batch of answers, .* set both to 1",
        ),
    "a generator that refreshes nothing": ({"generator.refresh_every_steps": 3},
        r"config\.generator\.refresh_every_steps = 3, but this task has nothing to refresh; set it to 0"),
    "answers": ({"evaluate.stage": "retriever"}, r"config\.evaluate\.stage = 'retriever': that stage trains 'reg\.ret"),
    "parameters that nobody keeps": ({"evaluate.step": 3, "joint.keep_every_steps": 2},
        r"config\.evaluate\.step = 3 is not a step whose parameters config\.joint keeps"),
    "searched index": ({"evaluate.index": "nowhere"}, r"config\.evaluate\.index = 'nowhere'"),
    "an index that nobody searches": ({"evaluate.stage": "generator", "evaluate.index": "index"},
        r"index = 'index' is not the index that config\.generator answers with \(none\); set it to ''"),
    "reasons": ({"annotate.reasons": "attributes"}, r"config\.annotate\.reasons = 'attributes': .*task marks reasons"),
    "queries of reasons": ({"reg.query": "reasons"}, r"config\.reg\.query = 'reasons', but no stage before 'index'"),
    "bart": ({"evaluate.bart_score": "./nowhere"}, "'./nowhere' is neither a folder nor"),
    "judge": ({"evaluate.judge": "index"}, r"config\.evaluate\.judge = 'index'"),
    "other corpus": ({"evaluate.corpus": "dailydialog"}, "DailyDialog is not downloaded automatically"),
    "contrast of a model that reads prompts": ({
        "reg.generator": {"architecture": "pretrained", "pretrained": "smollm2"},
        "prepare.tokenizer": {"pretrained": "smollm2", "tags": False}, "generator.contrast": {}},
        r"config\.generator\.contrast needs an encoder-decoder without adapters"),
    "exemplars that nobody finds": ({"evaluate.stage": "generator", "reg.decoding": COUNTING},
        r"config\.evaluate answers with config\.generator, which reads none; set it to 0"),
    "exemplars that nobody finds, by an evaluation's decoder": (
        {"evaluate.stage": "generator", "evaluate.decoding": COUNTING},
        r"^config\.evaluate\.decoding\.rerank_exemplars = 1\.0 looks at exemplars"),
    "copies from nowhere": ({"evaluate.stage": "generator", "reg.neighbours": {"copy_weight": 0.2}},
        r"reg\.neighbours\.copy_weight = 0\.2 looks at exemplars"),
    "peers": ({"report.peers": "nowhere"}, r"config\.report\.peers = 'nowhere' is not a folder with \*\.jsonl"),
    "nothing to report": ({"run": ["prepare", "report"]}, "has no stage of kind 'evaluate' before 'report'"),
    "nothing prepared": ({"run": ["attributes", "annotate"]}, "no stage 'prepare' before 'a"),
    "a stage twice": ({"run": ["prepare", "prepare"]}, "must list names of stages, each once"),
    "a word for stages": ({"run": "prepare"}, "must list names of stages"),
}  # fmt: skip


REWARDS = {
    "another kind": ([REWARD | {"kind": "compiled", "function": "json:dumps"}], "the reward json:dumps raised TypeErr"),
    "no identifiers": ([{"stages": ["generator"]}], r"rewards\.stages = 'generator'.*trains 'attributes\.identifier'"),
}
EMPRL = {
    **{name: ({"ppo.rewards": rewards}, message) for name, (rewards, message) in REWARDS.items()},
    "a source among passages": ({"ppo.index": "reindex", "ppo.rollout.encoder_repetition_penalty": 1.2},
        r"several passages; set them to 0 and 1 in config\.ppo\.rollout"),
    "a source among passages, where replies are kept in training": (
        {"ppo.index": "reindex", "emprl.decoding.encoder_no_repeat_ngram": 3, "evaluate.decoding": {"max_tokens": 9}},
        r"several passages; set them to 0 and 1 in config\.emprl\.decoding"),
    "contexts and buckets": ({"ppo.buckets": (24,)},
        r"config\.emprl\.layout\.max_context_tokens = \d+ is more than the longest of config\.ppo\.buckets, 24"),
    "answers without positions": (
        {"emprl.generator": {"architecture": "bart", "preset": "bart-base"}, "ppo.rollout.max_tokens": 1025},
        r"config\.ppo\.rollout\.max_tokens = 1025, but the model reads at most 1024 tokens"),
    "a judge twice": ({"evaluate.judge": ["identifiers", "identifiers"]},
        r"config\.evaluate\.judge has several judges of emotional_reaction.* and labels can come from one alone; name"),
    "a rollout's token that nobody has": ({"ppo.rollout.suppress_tokens": [1000000]},
        r"config\.ppo\.rollout\.suppress_tokens names the token 1000000"),
    "nobody to assess": ({"assess.judges": ()}, "judges must name at least one stage that trains a judge"),
    "only the critic": ({"ppo.value_warmup_steps": 2, "ppo.steps": 2},
        r"config\.ppo\.value_warmup_steps = 2 must be below steps = 2"),
    "a contrast that no policy keeps": (
        {"generator.contrast": {}, "emprl.decoding": {"method": "sample", "num_samples": 2, "rerank": "similarity"}},
        r"rerank = 'similarity' compares encodings from config\.generator\.contrast, which a policy does not keep; set",
        ),
    "exemplars that are not read": ({"emprl.decoding": COUNTING},
        r"rerank_exemplars = 1\.0 counts exemplars, but config\.ppo reads none"),
}  # fmt: skip


OTHERS = {
    "room for an exemplar in a prompt": (reg_llm, {"reg.layout.max_passage_tokens": 48},
        r"max_context_tokens = 56, with 48 tokens beside it, is more than the longest of config\.exemplars"),
    "room for an exemplar in a trial": (reg_llm, {"retriever.buckets": (87,)},
        r"= 56, with 32 tokens beside it, is more than the longest of config\.retriever\.buckets, 87, which cuts con"),
    "identifiers and buckets": (empathy_identifiers, {"identifiers.max_context_tokens": 17}, "set it to at most 16"),
    **{f"tokens that no vocabulary of {recipe.__name__} has": (recipe, {f"{name}.decoding.suppress_tokens": [10**6]},
        rf"config\.{name}\.decoding\.suppress_tokens names the token 1000000; it must be below")
       for recipe in (lempex, nec, reflectdiffu, classic) for name in [recipe.__name__.rpartition(".")[2]]},
}  # fmt: skip


@pytest.mark.parametrize(("recipe", "changes", "message"), OTHERS.values(), ids=OTHERS)
def test_a_mistake_in_other_systems_is_told_before_any_work(recipe, changes, message, tmp_path, refused):
    found = refused(changed(plain(recipe.get_config("tiny")), changes), tmp_path / "run")
    assert re.search(message, found), found


@pytest.mark.parametrize(("system", "name"), [*(("reg", name) for name in REG), *(("emprl", name) for name in EMPRL)])
def test_a_mistake_is_told_before_any_work(reg, emprl, tmp_path, system, name, refused):
    config, (changes, message) = (reg, REG[name]) if system == "reg" else (emprl, EMPRL[name])
    found = refused(changed(config, changes), tmp_path / "run")
    assert re.search(message, found), found


def test_a_retriever_that_no_stage_reads_need_not_be_there(tmp_path):
    config = plain(reg_transformer.get_config("no_retrieval,tiny"))
    for away in ({"reg.retriever.pretrained": "./nowhere"}, {"reg.layout.max_query_tokens": 300}):
        assert not list(run.find_problems(make_plan(changed(config, away)), WorkDir(tmp_path / "run")))


CUT = "which cuts contexts"
LATER = {
    "evaluate.index": ("index", r"encoder = '', but the queries of config\.evaluate belong to passages of 'retriever'"),
    "evaluate.decoding": ({"encoder_no_repeat_ngram": 3}, r"to 0 and 1 in config\.evaluate\.decoding"),
    "reg.decoding.encoder_no_repeat_ngram": (3, r"to 0 and 1 in config\.reg\.decoding"),
    "emprl.decoding.encoder_repetition_penalty": (2.0, r"to 0 and 1 in config\.emprl\.decoding"),
    "evaluate.buckets": ((24,), CUT),
    **{f"{name}.layout.max_context_tokens": (90, CUT) for name in ("lempex", "nec")},
    **{f"{name}.max_context_tokens": (900, CUT) for name in ("classic", "reflectdiffu")},
}


@pytest.mark.parametrize("change", LATER)
def test_a_changed_evaluation_is_told_what_the_finished_stage_cannot_do(emprl, tmp_path, change):
    """Without training again, so not by the checks of the trained stage."""
    others = {"lempex": lempex, "nec": nec, "classic": classic, "reflectdiffu": reflectdiffu}
    config = plain(others.get(change.partition(".")[0], reg_transformer).get_config("tiny"))
    config = changed(emprl, {"ppo.index": "reindex"}) if change.startswith("emprl") else config
    files, (value, message) = WorkDir(tmp_path), LATER[change]
    for stage in config["run"][: config["run"].index("evaluate")]:
        files.done(stage).parent.mkdir()
        files.done(stage).touch()
    assert not list(run.find_problems(make_plan(config), files))
    (found,) = run.find_problems(make_plan(changed(config, {change: value})), files)
    assert re.search(message, str(found)), found


def test_reasons_are_marked_before_contexts_are_embedded_by_them(emprl, tmp_path, refused):
    config = plain(reg_transformer.get_config("reasons,tiny"))
    assert not list(run.find_problems(make_plan(config), WorkDir(tmp_path / "run")))
    others = [name for name in config["run"] if name != "index"]
    place = others.index("attributes")
    config["run"] = [*others[:place], "index", *others[place:]]
    found = refused(config, tmp_path / "run")
    assert "no stage before 'index' marks reasons; put an annotate stage there whose `reasons`" in found
    config = changed(emprl, {"emprl.query": "reasons", "ppo.rewards": [{"goal": "f1"}]})
    assert "no stage before 'ppo' marks reasons" in refused(config, tmp_path / "run")


def test_a_loss_is_tried_on_sources_of_several_passages_where_a_stage_reads_them(reg, tmp_path, monkeypatch, refused):
    made = types.ModuleType("long_sources")
    vars(made).update(long=lambda logits, batch: batch.source_mask.sum(axis=1).astype("float32"))
    monkeypatch.setitem(sys.modules, "long_sources", made)
    losses = [{"function": "long_sources:long"}]
    assert not list(run.find_problems(make_plan(changed(reg, {"generator.losses": losses})), WorkDir(tmp_path / "run")))
    assert "the loss long_sources:long returns" in refused(changed(reg, {"joint.losses": losses}), tmp_path / "run")


def test_a_system_without_exemplars_counts_none_and_copies_none():
    for recipe, section in ((lempex, "lempex"), (nec, "nec"), (reflectdiffu, "reflectdiffu"), (classic, "classic")):
        with pytest.raises(ConfigError, match="rerank_exemplars"):
            make_plan(changed(plain(recipe.get_config("tiny")), {f"{section}.decoding": COUNTING}))
    with pytest.raises(ConfigError, match="which this system does not retrieve; leave it out"):
        make_plan(changed(plain(comet_t5.get_config("tiny")), {"seq2seq.passages": 2}))
    for recipe, section in ((lempex, "lempex"), (nec, "nec"), (emprl_transformer, "emprl")):
        with pytest.raises(ConfigError, match=r"neighbours\.knn_weight = 0\.1: this system answers without neighbours"):
            make_plan(changed(plain(recipe.get_config("tiny")), {f"{section}.neighbours": {"knn_weight": 0.1}}))


def test_tokens_that_a_trained_vocabulary_lacks_are_told_once_it_is_trained(tmp_path):
    config = plain(classic.get_config("tiny"))  # of at most 20,000 words
    rare = changed(config, {"evaluate.decoding": {"suppress_tokens": [19_999]}})
    for _ in range(2):  # of a resumed run before any work
        with pytest.raises(ConfigError, match=r"config\.evaluate\.decoding\.suppress_tokens names the token"):
            run.run(rare, tmp_path / "run")


def test_nec_has_one_place_for_attributes_and_facts_and_cuts_no_batch_with_a_contrast(tmp_path, refused):
    tiny = plain(nec.get_config("tiny"))
    with pytest.raises(ConfigError, match=r"attributes = True would take the place of facts about things"):
        make_plan(changed(tiny, {"nec.attributes": True}))
    make_plan(changed(tiny, {"nec.attributes": True, "nec.entity": False, "nec.ranker": ""}))
    cut = {"contrastive.accumulate": 2, "contrastive.contrast.in_batch": False, "contrastive.batch_size": 16}
    assert "contrastive.accumulate = 2 splits a batch" in refused(changed(tiny, cut), tmp_path / "run")


@pytest.mark.parametrize(("recipe", "kind"), [(nec, "knowledge"), (lempex, "annotate")])
def test_one_stage_finds_all_facts_and_one_all_attributes(recipe, kind, tmp_path, refused):
    config = plain(recipe.get_config("tiny"))
    place = config["run"].index(kind) + 1
    again = [*config["run"][:place], "again", *config["run"][place:]]
    found = refused(changed(config, {"run": again, "again": config[kind]}), tmp_path / "run")
    assert "their notes have the same names; leave 'again' out of config.run" in found
    assert not list(run.find_problems(make_plan(config), WorkDir(tmp_path / "run")))


def test_a_chat_template_that_shots_as_turns_do_not_fit_is_told_before_any_work(tmp_path, refused):
    template = (
        "{% for m in messages %}{% if m.role == 'user' %}[INST] "
        "{% if loop.index0 == 1 and messages[0].role == 'system' %}{{ messages[0].content }} {% endif %}"
        "{{ m.content }} [/INST]"
        "{% elif m.role == 'assistant' %} {{ m.content }}<|end|>{% endif %}{% endfor %}"
    )
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    folder = write_model(tmp_path / "model", "LlamaForCausalLM", template, **sizes)
    config = plain(reg_llm.get_config(f"{folder},in_context,tiny"))
    assert "turn differently; set it to 'apart' or 'response'" in refused(config, tmp_path / "run")
    plan = make_plan(changed(config, {"reg.exemplars": "apart"}))
    assert not list(run.find_problems(plan, WorkDir(tmp_path / "run")))


@pytest.mark.parametrize("form", ["eq10", ""])
def test_what_nobody_labels_has_no_weight_in_lempex(form, tmp_path, refused):
    config = plain(lempex.get_config(f"{form},tiny".strip(",")))
    unlabelled = changed(config, {"annotate.classifiers": [], "annotate.left_out": list(MECHANISMS)})
    found = refused(unlabelled, tmp_path / "run")
    assert "config.annotate.left_out names emotional_reaction, so config.generator.weights.emo" in found
    assert "has no labels to learn from; name a classifier of it in config.annotate.classifiers" in found
    plan = make_plan(changed(unlabelled, {f"generator.weights.{name}": 0.0 for name in MECHANISMS}))
    assert not list(run.find_problems(plan, WorkDir(tmp_path / "run")))


def test_judges_with_a_preset_have_the_vocabulary_of_their_folder(tmp_path):
    t5 = {"pretrained": lempex.WHEEL, "preset": "flan-t5-small"}
    changes = {
        "lempex.generator": {"architecture": "t5", "pretrained": lempex.WHEEL},
        "prepare.tokenizer": {"pretrained": lempex.WHEEL, "tags": False},
        **{f"{name}.encoder": t5 for name in ("judges", "sentiment")},
    }
    plan = make_plan(changed(plain(lempex.get_config("no_exemplars,tiny")), changes))
    assert not list(run.find_problems(plan, WorkDir(tmp_path / "run")))


def test_preferences_about_contexts_of_the_test_are_told_before_any_work(tmp_path, refused):
    config = plain(emprl_transformer.get_config("dpo,tiny")) | {"mesh": {"data": 1}}
    config["ppo"]["pairs"] = str(tmp_path / "pairs.jsonl")

    def write(split):
        first, *_ = sample.load_dialogues()[split][0].utterances
        row = {"context": [first.text], "chosen": "Tell me more!", "rejected": "I see."}
        (tmp_path / "pairs.jsonl").write_text(json.dumps(row) + "\n")

    write("test")
    assert "1 of 1 contexts of" in refused(config, tmp_path / "run")
    with_limit = changed(config, {"data.limit": 2})  # what is drawn is the test
    drawn = planned_instances(RunContext(WorkDir(tmp_path / "run"), make_plan(with_limit), "ppo"), "test")
    assert len(drawn) == 2
    with_own = changed(with_limit, {"data.name": "jsonl", "data.dir": str(write_own_corpus(tmp_path / "own"))})
    context = RunContext(WorkDir(tmp_path / "made"), make_plan(with_own), "prepare")
    drawn = planned_instances(context, "test")
    prepare.run(make_plan(with_own).stages["prepare"].settings, context)
    assert drawn == load_instances(context, "test")
    context.files.done("prepare").touch()  # damaged, and so made anew
    assert planned_instances(dataclasses.replace(context, redone=["prepare"]), "test") == drawn
    write("validation")
    assert not list(run.find_problems(make_plan(config), WorkDir(tmp_path / "run")))
    labelled = plain(reg_transformer.get_config("tiny"))
    added = {name: labelled[name] for name in ("attributes", "annotate")}
    config = config | added | {"run": ["prepare", *added, *config["run"][1:]]}
    found = refused(config, tmp_path / "run")
    assert "contexts of config.ppo.pairs have no attributes, but the generator reads contexts with them; set" in found
    plan = make_plan(changed(config, {"emprl.attributes": False, "emprl.emotion_share": 0.0}))
    assert not list(run.find_problems(plan, WorkDir(tmp_path / "run")))


def own_rewards(module, monkeypatch, **functions):
    """Rewards of somebody, as settings."""
    made = types.ModuleType(module)
    vars(made).update(functions)
    monkeypatch.setitem(sys.modules, module, made)
    return [{"kind": "text", "function": f"{module}:{name}"} for name in functions]


def test_a_reward_that_wants_a_field_which_no_row_will_have_is_told_before_any_work(
    emprl, tmp_path, monkeypatch, refused
):
    rewards = own_rewards("topical", monkeypatch, of_topic=lambda c, responses, g, topic: [len(t) for t in topic])
    assert "the reward topical:of_topic needs topic; the fields of its rows will be emotion, id" in refused(
        changed(emprl, {"ppo.rewards": rewards}), tmp_path / "run"
    )
    own = own_corpus(tmp_path / "own", "")
    config = changed(emprl, own | {"ppo.rewards": rewards})
    assert "needs topic" in refused(config, tmp_path / "run")
    lines = [{"id": f"{i}", "utterances": ["I won!", "Well done!"], "topic": "sport"} for i in range(2)]
    lines = [{"id": "x", "utterances": ["Hi.", "Hello."]}, *lines]  # the first has none: another one is tried
    (tmp_path / "own" / "train.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert not list(run.find_problems(make_plan(config), WorkDir(tmp_path / "run")))
    lines[2]["topic"] = 3  # on which the function fails
    (tmp_path / "own" / "train.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert "the reward topical:of_topic raised TypeError" in refused(config, tmp_path / "run")


def test_a_reward_may_ask_for_the_situation_that_dialogues_tell(emprl, tmp_path, monkeypatch):
    rewards = own_rewards("telling", monkeypatch, told=lambda c, r, g, situation: [len(one) for one in situation])
    assert not list(run.find_problems(make_plan(changed(emprl, {"ppo.rewards": rewards})), WorkDir(tmp_path / "run")))


def test_identifiers_that_reward_together_cover_each_mechanism_and_may_read_otherwise(emprl, tmp_path, refused):
    config = changed(emprl, {"identifiers.mechanisms": ["exploration"]})
    assert "the identifiers cover exploration; they must cover each" in refused(config, tmp_path / "run")
    other = config["identifiers"] | {"mechanisms": ["emotional_reaction", "interpretation"], "max_context_tokens": 8}
    other["encoder"] = {"pretrained": "minilm"}
    place = emprl["run"].index("identifiers")
    config = config | {"others": other, "run": [*emprl["run"][:place], "others", *emprl["run"][place:]]}
    config["ppo"]["rewards"] = [{"stages": ["identifiers", "others"]}]
    config["evaluate"]["judge"] = ["identifiers", "others"]
    assert not list(run.find_problems(make_plan(config), WorkDir(tmp_path / "run")))


def own_corpus(folder, emotion):
    write_rows(folder, {"id": "a", "emotion": emotion, "utterances": ["I won!", "Well done!"]})
    return {"data.name": "jsonl", "data.dir": str(folder)}


def test_a_corpus_without_emotions_is_told_where_a_stage_learns_them(reg, tmp_path, refused):
    config = changed(reg, own_corpus(tmp_path / "bare", ""))
    assert "config.emotions: no dialogue of the split 'train' has an emotion" in refused(config, tmp_path / "run")
    with_them = changed(reg, own_corpus(tmp_path / "rich", EMOTIONS[0]))
    assert not list(run.find_problems(make_plan(with_them), WorkDir(tmp_path / "run")))
    (tmp_path / "rich" / "test.jsonl").write_text('{"id": 1, "utterances": ["a", "b"]}\n')
    assert "test.jsonl, line 1: id = 1 must be a text" in refused(with_them, tmp_path / "run")


def test_a_generator_with_an_index_of_its_own_searches_no_other(tmp_path, refused):
    config = plain(lempex.get_config("tiny"))
    for index in ("", "index", evaluate.Settings.index):
        config["evaluate"]["index"] = index
        assert not list(run.find_problems(make_plan(config), WorkDir(tmp_path / "run")))
    config["evaluate"]["index"] = "nowhere"
    assert "is not the index that config.generator answers with (index); set" in refused(config, tmp_path / "run")


def test_negatives_of_other_emotions_need_two(tmp_path, refused):
    tiny = plain(lempex.get_config("tiny"))
    without = changed(tiny, own_corpus(tmp_path / "none", ""))
    assert "; give them emotions, or set negatives = ()" in refused(without, tmp_path / "run")
    config = changed(tiny, own_corpus(tmp_path / "one", EMOTIONS[0]))
    assert "fewer than two emotions; give them emotions, or set negatives = ()" in refused(config, tmp_path / "run")
    config["retriever"]["negatives"] = ("same_emotion",)
    assert not list(run.find_problems(make_plan(config), WorkDir(tmp_path / "run")))


def test_a_pretrained_folder_without_weights_is_told(reg, tmp_path, refused):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "t5"}')
    config = changed(reg, {"reg.generator": {"architecture": "t5", "pretrained": str(folder)}})
    assert str(folder) in refused(config, tmp_path / "run")


TURNS = ["hit:9_conv:9,1,sad,Rain,0,It rains.,,", "hit:9_conv:9,2,sad,Rain,1,Oh no.,,"]


def archive(folder, *, turns=2, keep=1.0, names=("train", "valid", "test")):
    """An archive of EmpatheticDialogues, with one dialogue in each split."""
    folder.mkdir(parents=True)
    content = archive_of((HEADER + "".join(f"{turn}\n" for turn in TURNS[:turns])).encode(), names)
    (folder / empathetic_dialogues.ARCHIVE_NAME).write_bytes(content[: int(keep * len(content))])
    return folder


@pytest.mark.parametrize(
    ("made", "message"),
    [
        ({}, ""),
        ({"turns": 1}, "no dialogue of the split 'train' has a reply"),
        ({"turns": 0}, "the file ends without a dialogue"),
        ({"keep": 0.0}, "is cut short or no .tar.gz"),
        ({"keep": 0.8}, "is cut short or no .tar.gz"),
        ({"names": ("train", "valid")}, "holds no empatheticdialogues/test.csv"),
    ],
)
def test_a_damaged_or_empty_archive_is_told_in_a_plan_too(reg, tmp_path, made, message, refused):
    where = {"data.name": "empathetic_dialogues", "data.dir": str(archive(tmp_path / "data", **made))}
    config = changed(reg, where)
    found = [str(problem) for problem in run.problems_of_plan(make_plan(config), tmp_path / "run")]
    assert bool(found) == bool(message)
    assert message in "\n".join(found)
    if message:
        assert message in refused(config, tmp_path / "run")


def test_a_corpus_of_ones_own_without_a_reply_is_told_in_a_plan_too(reg, tmp_path, refused):
    write_rows(tmp_path, {"id": "a", "utterances": ["hello"]})
    config = changed(reg, {"data.name": "jsonl", "data.dir": str(tmp_path)})
    message = "no dialogue of the split 'train' has a reply, so there is nothing to learn"
    assert message in str(run.problems_of_plan(make_plan(config), tmp_path / "run")[0])
    assert message in refused(config, tmp_path / "run")


def test_other_corpora_are_read_before_any_work(reg, tmp_path, refused):
    (tmp_path / "dialogues_test.txt").write_text("no turn\n")
    config = changed(reg, {"evaluate.corpus": "dailydialog", "data.dir": str(tmp_path)})
    assert "dialogues_test.txt, line 1" in refused(config, tmp_path / "run")
    (tmp_path / "reccon_dailydialog_train.json").write_text("{}")
    reasons = plain(reflectdiffu.get_config("tiny"))
    config = changed(reasons, {"reasons.data": "reccon", "data.dir": str(tmp_path)})
    assert "reccon_dailydialog_valid" in refused(config, tmp_path / "run")
    (tmp_path / "reccon_dailydialog_valid.json").write_text("{}")
    assert "reccon_dailydialog_test" in refused(config, tmp_path / "run")  # the annotator is measured at its end


def test_half_of_epitome_or_a_broken_file_is_refused_where_a_linear_judge_would_learn_from_it(reg, refused, tmp_path):
    config = changed(reg, {"evaluate.linear_judge": True, "data.dir": str(tmp_path)})
    assert not list(run.find_problems(make_plan(config), WorkDir(tmp_path / "run")))  # nobody needs the judge
    write(tmp_path, ["0120", "2101", "1022"])
    path = tmp_path / epitome.FILES["exploration"]
    path.write_text(path.read_text().replace(",2,", ",3,"))
    assert "level is '3', must be 0, 1 or 2" in refused(config, tmp_path / "run")
    path.unlink()
    assert "holds no EPITOME" in refused(config, tmp_path / "run")


def test_finished_stages_are_not_checked_again(reg, tmp_path):
    config = changed(reg, {"attributes.data": "epitome"})
    files = WorkDir(tmp_path)
    plan = make_plan(config)
    assert len(list(run.find_problems(plan, files))) == 1
    files.done("attributes").parent.mkdir()
    files.done("attributes").touch()
    assert not list(run.find_problems(plan, files))
    assert len(list(run.find_problems(plan, files, redo=["attributes"]))) == 1
    assert len(run.problems_of_plan(plan, tmp_path, ["attributes"])) == 1
    assert not run.problems_of_plan(plan, tmp_path, ["evaluate"])


def test_the_corrected_command_goes_on_in_the_same_work_directory(reg, tmp_path, monkeypatch, refused):
    ran = []
    monkeypatch.setattr(prepare, "run", lambda settings, run: ran.append(settings.tokenizer.vocab_size))
    config = changed(reg, {"run": ["prepare"], "prepare.tokenizer.vocab_size": 100})
    refused(config, tmp_path / "run")
    run.run(changed(config, {"prepare.tokenizer.vocab_size": 400}), tmp_path / "run")
    assert ran == [400]


def test_a_plan_names_every_problem_and_fetches_nothing(reg, tmp_path, monkeypatch):
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: pytest.fail("something is fetched"))
    away = {"architecture": "t5", "pretrained": "google/flan-t5-small", "preset": "t5-small"}
    config = changed(reg, {"attributes.data": "epitome", "report.peers": "nowhere", "reg.generator": away})
    found = [str(problem) for problem in run.problems_of_plan(make_plan(config), tmp_path / "run")]
    assert len(found) == 2
    assert "EPITOME" in found[0]
    assert "config.report.peers" in found[1]
    config["plan"]["topology"] = "v5e:2x4"  # made for devices elsewhere, where the data may be
    assert not run.problems_of_plan(make_plan(config), tmp_path / "run")
