"""Every form of every recipe alone and beside every other: nothing contradicts, nothing is trained for nobody."""

import dataclasses
import functools
import importlib
import itertools
import pkgutil
import re
from pathlib import Path

import pytest
from ml_collections import ConfigDict

import configs
from configs import (
    classic,
    comet_t5,
    common,
    empathy_identifiers,
    emprl_llm,
    emprl_t5,
    emprl_transformer,
    lempex,
    lempex_retriever,
    nec,
    published,
    quickstart,
    reflectdiffu,
    reg_llm,
    reg_t5,
    reg_transformer,
)
from empax.core.config import ConfigError
from empax.pipeline.plan import make_plan, plain
from empax.pipeline.records import settings_hash
from empax.systems.nec.settings import NecSettings
from empax.systems.reflectdiffu.settings import GeneratorTaskSettings

TOGETHER = {
    "reflectdiffu": (reflectdiffu, tuple(reflectdiffu.FORMS)),
    "lempex": (lempex, (*lempex.FORMS, "q=10")),
    "nec": (nec, nec.FORMS),
}
"""Recipes whose forms go together."""

OF_TAGS = {"shuffled_tags", "untrained_reasons"}
OF_LOSSES = {"unfrozen", "time_axis", "gumbel"}
OF_EXEMPLARS = {"pretrained_retriever", "predicted_emotion", "gold_emotion", "q=10"}
REFUSED = {
    "reflectdiffu": {
        "no_reasons": OF_TAGS,
        "no_experts": {"batch_majority"},
        "no_second_intent": {"table_1", "constant_second", "eq9", "empathy_reward"},
        "no_mimicry": {"eq7"},
        "plain": {*OF_TAGS, "batch_majority", "eq7", "eq9", "eq10", "table_1", "constant_second", "empathy_reward"},
        "eq10": {"eq9", "empathy_reward"},
        "constant_second": {"table_1", "eq9", "empathy_reward"},
        "empathy_reward": {"eq9"},
        "shuffled_tags": {"no_tags", "untrained_reasons"},
    },
    "lempex": {
        "no_losses": {*OF_LOSSES, "binary", "weights_1", "eq10"},
        "no_judges": {*OF_LOSSES, "binary", "weights_1", "eq10"},
        "no_exemplars": OF_EXEMPLARS,
        "t5_glove": {*OF_LOSSES, *OF_EXEMPLARS, "binary", "weights_1", "eq10"},
        "eq10": OF_LOSSES,
        "predicted_emotion": {"gold_emotion"},
        "t5": {"full_size"},
    },
    "nec": {"no_entity": {"ranker"}, "no_rerank": {"random_beam"}},
}
"""By form, those that do not go with it."""

READ = {name: functools.cache(recipe.read) for name, (recipe, _) in TOGETHER.items()}


def refused(name, forms):
    table = REFUSED[name]
    return any(one in table.get(other, ()) for one, other in itertools.permutations(forms, 2))


@pytest.mark.parametrize("name", TOGETHER)
def test_of_all_pairs_those_are_refused_that_contradict_or_have_nothing_to_change(name):
    for pair in itertools.combinations(TOGETHER[name][1], 2):
        if refused(name, pair):
            with pytest.raises(ValueError, match=rf"^{name}\.py:x: '") as caught:
                common.check_together("x", f"{name}.py", pair, READ[name])
            assert all(repr(form) in str(caught.value) for form in pair)
        else:
            common.check_together("x", f"{name}.py", pair, READ[name])


@pytest.mark.parametrize(
    ("name", "forms", "message"),
    [
        ("reflectdiffu", "no_second_intent,empathy_reward", "'empathy_reward' changes nothing beside 'no_second"),
        ("reflectdiffu", "no_second_intent,no_mimicry,eq10", "'eq10' changes .* 'no_second_intent' and 'no_mimicry'"),
        ("lempex", "predicted_emotion,gold_emotion", "contradict each other: index.filter is 'predicted_emotion' with"),
        ("nec", "no_entity,no_social,shuffled", "'shuffled' changes nothing beside 'no_entity' and 'no_social'"),
    ],
)
def test_a_recipe_says_what_does_not_go_together(name, forms, message):
    with pytest.raises(ValueError, match=rf"^{name}\.py:{forms}: .*{message}"):
        TOGETHER[name][0].get_config(forms)


@pytest.mark.parametrize("machine", ["cpu", "gpu"])
def test_classifiers_whose_outputs_are_read_are_selected_by_likelihood_and_read_a_context_once(machine):
    config = reflectdiffu.get_config(f"machine={machine}")
    for stage in (config.intents, config.reasons):
        assert (stage.best_metric, stage.best_mode) == ("loss", "min")
    assert config.intents.steps * config.intents.batch_size <= 32_992
    assert config.reasons.steps == 300


@pytest.mark.parametrize(("name", "forms"), [("nec", "no_contrast,no_rerank"), ("reflectdiffu", "no_experts,plain")])
def test_what_is_left_out_may_be_left_out_twice(name, forms):
    TOGETHER[name][0].get_config(forms)


def idle(config):
    """The stages that are trained and named nowhere, not by a default either, or end before they are measured."""
    plan = make_plan(config)
    settings = {name: stage.settings for name, stage in plan.stages.items()}
    read = {name: plain(dataclasses.asdict(one)) for name, one in {**settings, "": plan.system_settings}.items()}
    trained = {name: stage.loop for name, stage in plan.stages.items() if stage.kind == "train"}
    unread = [name for name in trained if not any(_names(read[other], name) for other in read if other != name)]
    return unread + [name for name, loop in trained.items() if loop.eval_every_steps > loop.steps > 1]


def _names(value, stage):
    if isinstance(value, dict):
        return any(_names(part, stage) for part in value.values())
    return any(_names(part, stage) for part in value) if isinstance(value, list) else value == stage


LONE = [
    *((reg_transformer, form) for form in ("", *reg_transformer.FORMS)),
    *((reg_t5, form) for form in ("", *reg_t5.FORMS, *(f"base,{form}" for form in reg_t5.FORMS))),
    *((reg_llm, form) for form in ("", *reg_llm.FORMS, *(f"llama-3.1-8b,{form}" for form in reg_llm.FORMS))),
    *((recipe, f"{form}{more}") for recipe in (emprl_transformer, emprl_t5, emprl_llm)
      for form in ("", *recipe.FORMS) for more in ("", ",dailydialog")),
    *((classic, f"{form}{more}") for form in classic.FORMS for more in ("", ",lineage")),
    *((recipe, "") for recipe in (comet_t5, lempex_retriever, quickstart)),
    *((empathy_identifiers, form) for form in ("", *empathy_identifiers.FORMS)),
    *((published, name) for name in published.BASES),
]  # fmt: skip
RECIPES = [
    importlib.import_module(f"configs.{one.name}")
    for one in pkgutil.iter_modules(configs.__path__)
    if one.name not in ("common", "layouts", "finetune")  # the last is for a user's texts
]
FOUND = [recipe for recipe in RECIPES if recipe not in [one for one, _ in (*LONE, *TOGETHER.values())]]
LONE += [(recipe, form) for recipe in FOUND for form in ("", *getattr(recipe, "FORMS", ()))]


@pytest.mark.parametrize("size", ["", "tiny", "machine=gpu"])
@pytest.mark.parametrize("recipe", list(dict.fromkeys(recipe for recipe, _ in LONE)), ids=lambda m: m.__name__)
def test_no_stage_of_a_form_is_idle(recipe, size):
    if size not in ("", "tiny", *(f"machine={machine}" for machine in getattr(recipe, "MACHINES", ()))):
        return  # it has one size
    for form in (form for other, form in LONE if other is recipe):
        assert not idle(plain(recipe.get_config(f"{form},{size}"))), form


@pytest.mark.slow
@pytest.mark.parametrize("name", TOGETHER)
def test_no_stage_of_two_forms_together_is_idle(name):
    recipe, forms = TOGETHER[name]
    for pair in itertools.combinations_with_replacement(forms, 2):
        if not refused(name, pair):
            assert not idle(plain(recipe.get_config(",".join(dict.fromkeys(pair))))), pair


@pytest.mark.parametrize("recipe", [emprl_transformer, emprl_t5, emprl_llm])
@pytest.mark.parametrize("form", ["", "grpo", "gspo"])
def test_policies_may_begin_where_bfloat16_rounds_responses_otherwise(recipe, form):
    config = recipe.get_config(form)
    exact = config.emprl.generator.dtype == "float32"
    assert exact == (form == "gspo")
    assert config.ppo.get("guard_tolerance") == (None if exact else 0.05)


def test_facts_that_nobody_reads_are_not_looked_for():
    assert "knowledge" not in nec.get_config("no_entity,no_social").run
    assert "knowledge" in nec.get_config("no_entity").run


@pytest.mark.parametrize("changes", [{"second_intent": False}, {"policy_weight": 0.0}])
def test_a_reward_needs_a_second_intent_that_learns(changes):
    with pytest.raises(ConfigError, match=r"reward = 'empathy' changes nothing where"):
        GeneratorTaskSettings(reward="empathy", judges=("identifiers",), **changes)


def test_a_ranker_needs_facts_to_rank():
    with pytest.raises(ConfigError, match="ranker = 'ranker' ranks facts about things, which entity = False leaves"):
        NecSettings(ranker="ranker", entity=False)


@pytest.mark.parametrize(
    ("recipe", "form"), [(recipe, form) for recipe in (reg_transformer, reg_t5) for form in recipe.FORMS]
)
def test_forms_of_reg_share_a_beginning_as_recipes_md_says(recipe, form):
    whole, config = (make_plan(plain(recipe.get_config(argument))).stages for argument in ("", form))
    shared = ["prepare", "generator", "index"]
    if form in ("no_attributes", "reasons"):
        shared = ["prepare"]
    if form in ("no_retrieval", "sft", "contrastive", "knn"):
        shared = ["prepare", "generator"]
    pairs = list(zip(whole, config, strict=False))
    alike = [one == other and settings_hash(whole[one]) == settings_hash(config[one]) for one, other in pairs]
    assert list(config)[: alike.index(False)] == shared


@pytest.mark.parametrize(("form", "second"), [("", "exemplars"), ("apart", "exemplars"), ("no_retrieval", "longer")])
def test_regs_first_stage_leaves_the_decay_of_its_rate_to_the_next(form, second):
    config = reg_transformer.get_config(form)
    first, then = config.generator.optimizer, config[second].optimizer
    assert (first.schedule, then.schedule) == ("rsqrt", "linear")
    last = first.learning_rate * (first.warmup_steps / config.generator.steps) ** 0.5
    assert 1 / 2 < last / then.learning_rate < 2
    assert emprl_transformer.get_config("sft").generator.optimizer.schedule == "linear"  # the only stage


@pytest.mark.parametrize("more", ["", ",lineage"])
def test_empdg_with_critics_is_empdg_and_critics(more):
    alone, both = (plain(classic.get_config(f"{form}{more}")) for form in ("empdg", "empdg_critics"))
    del both["classic"]["adversary"], both["generator"]["optimizer"]["groups"]
    for loss in ("adversary", "critics"):
        del both["generator"]["weights"][loss]
    assert both == alone


@pytest.mark.parametrize("recipe", [reg_transformer, reg_t5])
def test_a_generator_learns_to_read_the_exemplars_of_a_retriever_trained_by_contrast(recipe):
    config = recipe.get_config("contrastive")
    assert config[config.exemplars.index].encoder == config.exemplars.retriever == "contrastive"
    order = [config.run.index(stage) for stage in ("contrastive", config.exemplars.index, "exemplars")]
    assert order == sorted(order)


@pytest.mark.parametrize("change", [{"decoding": {"max_tokens": 9}}, {"passages": 2}, {"speakers": False}])
def test_lempex_retrieves_alike_whatever_reads_the_exemplars(change):
    config = plain(lempex.get_config(""))
    other = {**config, "lempex": {**config["lempex"], **change}}
    before, after = make_plan(config).stages, make_plan(other).stages
    for name in ("retriever", "index"):
        assert settings_hash(before[name]) == settings_hash(after[name])


@pytest.mark.parametrize("more", ["", ",machine=gpu"])
@pytest.mark.parametrize("form", classic.FORMS)
def test_each_stage_of_the_classic_family_warms_up_for_an_eighth_of_its_steps(form, more):
    config = classic.get_config(form + more)
    for stage in (config[name] for name in config.run if config[name].get("kind") == "train"):
        assert stage.optimizer.warmup_steps == stage.steps // 8


def test_the_guide_tells_how_the_lineage_trains():
    smooth = {form for form in classic.FORMS if classic.get_config(f"{form},lineage").generator.get("label_smoothing")}
    assert smooth == {*classic.FORMS} - {"cem", "case"}
    config = classic.get_config("moel,lineage")
    told = f"It computes in {config.classic.dtype}, Adam's second moment decays by {config.generator.optimizer.b2}"
    told += f", and all but CEM and CASE have a label smoothing of {config.generator.label_smoothing}."
    page = (Path(__file__).parents[2] / "docs" / "classic.md").read_text(encoding="utf-8")
    assert told in " ".join(page.split())


@pytest.mark.parametrize("form", ["", "t5", "machine=gpu", "full_size"])
def test_lempex_reads_as_much_of_an_exemplar_as_it_learns_of_a_response(form):
    layout = lempex.get_config(form).lempex.layout
    assert layout.max_passage_tokens >= layout.max_target_tokens


@pytest.mark.parametrize(
    ("form", "changed"), [("no_rerank", {"rerank_similarity": 0.0}), ("random_beam", {"rerank": "random"})]
)
def test_other_choices_among_beams_are_of_the_same_model(form, changed):
    whole, other = (plain(nec.get_config(f"scratch{form}")) for form in ("", f",{form}"))
    assert other["evaluate"]["decoding"] == {**whole["nec"]["decoding"], **changed}
    before, after = make_plan(whole).stages, make_plan(other).stages
    for name in ("knowledge", "generator", "contrastive"):
        assert settings_hash(before[name]) == settings_hash(after[name])


@pytest.mark.parametrize("form", ["", "scratch", "bart", "no_contrast", "scratch,no_rerank", "scratch,random_beam"])
def test_necs_beams_say_no_sentence_twice(form):
    config = plain(nec.get_config(form))
    size = 3 if {"scratch", "bart"} & set(form.split(",")) else 4
    assert config["evaluate"].get("decoding", config["nec"]["decoding"])["no_repeat_ngram"] == size


@pytest.mark.parametrize("form", ["", "machine=gpu", "base", "no_retrieval,machine=gpu"])
def test_reg_answers_by_the_leaderboards_decoder_on_every_machine(form):
    assert reg_t5.get_config(form).reg.decoding.to_dict() == common.T5_CONSENSUS


@pytest.mark.parametrize("recipe", [emprl_transformer, emprl_t5, emprl_llm])
def test_whole_dialogues_are_answered_in_as_many_rows_as_single_turns(recipe):
    """Few dialogues have more than two listener turns, so that further ones would be filler rows."""
    dialogues, turns = (recipe.get_config(form).ppo for form in ("trajectory", ""))
    assert (dialogues.max_turns, dialogues.max_turns * dialogues.batch_size) == (2, turns.batch_size)
    page = (Path(__file__).parents[2] / "docs" / "rewards.md").read_text(encoding="utf-8")
    assert "the first two listener turns are answered" in page
    assert f"Recipes in bfloat16 allow {turns.guard_tolerance}" in page


def test_the_documents_contrast_for_reg_splits_no_batch():
    page = (Path(__file__).parents[2] / "docs" / "nec.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    config = reg_transformer.get_config()
    exec(example, {"config": config, "ConfigDict": ConfigDict})  # the page is ours
    stage = make_plan(plain(config)).stages["joint"]
    assert stage.settings.contrast is not None
    assert stage.loop.accumulate * stage.loop.minibatches == 1  # see `training.settings.check_whole_batches`
