"""The order of a run, and what is wrong with a config before any work starts."""

from pathlib import Path

import pytest

from configs import (
    classic,
    comet_t5,
    emprl_llm,
    emprl_t5,
    emprl_transformer,
    lempex,
    nec,
    quickstart,
    reflectdiffu,
    reg_llm,
    reg_t5,
    reg_transformer,
)
from empax.core.config import ConfigError, to_settings
from empax.core.files import WorkDir, read_json, write_json
from empax.core.system import RunContext
from empax.interop import pretrained, pretrained_encoders
from empax.parts.exemplars.settings import RetrievalSettings
from empax.pipeline import evaluate, prepare, run, workdirs
from empax.pipeline.plan import make_plan, plain
from empax.systems.reg.parts import RegParts
from tests.plans import changed


@pytest.fixture
def config():
    return plain(reg_transformer.get_config("tiny"))


@pytest.mark.parametrize(
    ("recipe", "name"),
    [(reg_transformer, ""), (reg_t5, "small"), (reg_llm, "smollm2"), (reg_llm, "llama-3.1-8b")],
)
def test_no_attributes_takes_every_emotion_from_the_retriever_and_nothing_else(recipe, name):
    whole = plain(recipe.get_config(name))
    found = plain(recipe.get_config(f"{name},no_attributes" if name else "no_attributes"))
    assert list(make_plan(found).stages) == [n for n in whole["run"] if n != "emotions"]
    changed = {where.removeprefix("config."): now for where, _, now in workdirs.differences(whole, found)}
    # Sources without attributes are shorter.
    unrelated = tuple(where for where in changed if where.startswith("emotions") or where.endswith(".buckets"))
    without = {where: now for where, now in changed.items() if where not in unrelated}
    assert without.pop("run") == found["run"]
    assert without == {
        "reg.attributes": False,
        "reg.emotion_share": 0.0,
        "retriever.start_from": "",
        "retriever.distillation.emotion_weight": 0.0,
        "joint.distillation.emotion_weight": 0.0,
    }


def test_attributes_are_not_switched_off_while_emotions_still_choose():
    config = plain(reg_transformer.get_config())
    config["reg"]["attributes"] = False
    with pytest.raises(ConfigError, match=r"attributes = False with emotion_share = 0\.5 still retrieves by emotion"):
        to_settings(RetrievalSettings, config["reg"], where="config.reg")
    config["reg"]["emotion_share"] = 0.0  # as the message advises
    to_settings(RetrievalSettings, config["reg"], where="config.reg")


@pytest.mark.parametrize(
    ("recipe", "name"),
    [(reg_t5, name) for name in reg_t5.HUB] + [(reg_llm, name) for name in (*reg_llm.LIGHT, *reg_llm.PRESETS)],
)
def test_every_pretrained_backbone_is_sound_and_planned_without_a_file(recipe, name, monkeypatch):
    config = plain(recipe.get_config(name))
    assert list(make_plan(config).stages) == list(reg_transformer.get_config().run)
    if name in reg_llm.LIGHT:
        return
    resolve = pretrained.resolve
    found = lambda model: resolve(model) if model == "minilm" else pytest.fail(f"{model} is looked for")  # noqa: E731
    for module in (pretrained, pretrained_encoders):
        monkeypatch.setattr(module, "resolve", found)
    parts = RegParts.of(RunContext(WorkDir(Path("nowhere")), make_plan(config), "joint"), planned=True)
    widths = {"small": 512, "base": 768, "large": 1024, "xl": 2048, "llama-3.1-8b": 4096}
    assert parts.generator.generator.model.config.d_model == widths[name]
    assert parts.retrieval.encoder.model.encoder.config.num_layers == (6 if recipe is reg_llm else 12)


@pytest.mark.parametrize("variant", ["", *emprl_transformer.FORMS])
def test_every_variant_of_emprl_is_sound_and_takes_dailydialog(variant):
    stages = list(make_plan(plain(emprl_transformer.get_config(variant))).stages.values())
    assert [stage.name for stage in stages][-2:] == ["evaluate", "report"]
    config = plain(emprl_transformer.get_config(f"{variant},dailydialog"))
    added = list(make_plan(config).stages.values())[len(stages) - 1 : -1]
    trained = {"sft": ["generator"], "retrieval": ["ppo"]}.get(variant, ["generator", "ppo"])
    assert [stage.settings.stage for stage in added] == trained
    assert {(stage.settings.corpus, stage.settings.judge) for stage in added} == {("dailydialog", "")}
    assert evaluate.main_stage(make_plan(config)) == "evaluate"


@pytest.mark.parametrize("recipe", [emprl_transformer, emprl_t5, emprl_llm])
def test_gspo_whose_clipping_is_narrow_computes_in_float32(recipe):
    for machine in ("cpu", "gpu"):
        dtypes = [recipe.get_config(f"{form},machine={machine}").emprl.generator.dtype for form in ("grpo", "gspo")]
        assert dtypes == ["bfloat16", "float32"]


@pytest.mark.parametrize("variant", ["", *emprl_transformer.FORMS])
def test_every_variant_of_emprl_has_a_trial_of_the_same_stages(variant):
    whole, small = (plain(emprl_transformer.get_config(f"{variant}{behind}")) for behind in ("", ",tiny"))
    assert small["data"]["name"] == "sample"
    kept = [name for name in whole["run"] if name != "second_seed"]
    assert list(make_plan(small).stages) == kept
    for name in kept:
        assert [small[name].get(key) for key in ("task", "stage", "index")] == [
            whole[name].get(key) for key in ("task", "stage", "index")
        ]
    both = emprl_transformer.get_config(f"{variant},dailydialog,tiny")
    assert plain(both) == plain(emprl_transformer.get_config(f"tiny,dailydialog,{variant}"))


def test_the_second_seed_has_seen_other_posts_than_the_identifiers_that_reward_whatever_the_seed(tmp_path):
    config = plain(emprl_transformer.get_config())
    for seed in range(3):
        contexts = [
            RunContext(WorkDir(tmp_path), make_plan(config | {"seed": seed}), name)
            for name in ("identifiers", "second_seed", "generator")
        ]
        assert [context.seed for context in contexts] == [0, 1, seed]


@pytest.mark.parametrize(
    ("recipe", "form"),
    [
        *((lempex, form) for form in ("", *lempex.FORMS, "q=10", "t5,t5_glove", "no_exemplars,gumbel")),
        *(
            (nec, form)
            for form in ("", *nec.FORMS, "scratch", "bart", "machine=gpu", "no_contrast,no_rerank,no_social")
        ),
    ],
)
def test_every_form_is_another_one_is_sound_and_has_a_trial(recipe, form, tmp_path):
    whole = plain(recipe.get_config(form))
    assert (whole == plain(recipe.get_config())) == (not form)
    small = plain(recipe.get_config("tiny" if "machine" in form else f"{form},tiny"))
    plan = make_plan(small)
    assert list(plan.stages) == list(make_plan(whole).stages)
    assert small["data"]["name"] == "sample"
    assert not list(run.find_problems(plan, WorkDir(tmp_path)))


@pytest.mark.parametrize(
    ("recipe", "form"),
    [(classic, "transformer"), (classic, "emo_prepend"), (lempex, ""), (nec, "scratch"), (reflectdiffu, "")],
)
def test_a_gpu_compiles_for_one_length_and_learns_for_longer(recipe, form):
    of = lambda machine: plain(recipe.get_config(f"{form},machine={machine}"))  # noqa: E731
    cpu, gpu = of("cpu"), of("gpu")
    assert cpu["run"] == gpu["run"]
    assert make_plan(gpu).stages["generator"].loop.steps > cpu["generator"]["steps"]
    for name in gpu["run"]:
        if "buckets" in gpu[name]:
            assert gpu[name]["buckets"] == cpu[name]["buckets"][-1:]


@pytest.mark.parametrize("folder", ["", "FOLDER"])
def test_a_comet_is_trained_from_a_wheel_or_a_folder(folder, tmp_path):
    name = str(tmp_path) if folder else ""
    whole, small = (plain(comet_t5.get_config(arg)) for arg in (name, f"{name},tiny"))
    assert list(make_plan(small).stages) == list(make_plan(whole).stages)
    assert whole["seq2seq"]["generator"]["pretrained"] == (name or "flan-t5-small-titles")
    assert [small["seq2seq"]["generator"].get(key) for key in ("pretrained", "preset")] == (
        [name, None] if name else [None, "t5-tiny"]
    )


def test_quickstart_is_sound_and_needs_no_download():
    for name in ("", *reg_t5.LIGHT, f"{reg_t5.PUBLISHED},tiny"):
        config = plain(quickstart.get_config(name))
        make_plan(config)
        assert config["data"]["name"] == "sample"
        model = name.removesuffix(",tiny") or quickstart.MODEL
        assert config["reg"]["generator"]["pretrained"] == config["prepare"]["tokenizer"]["pretrained"] == model


@pytest.mark.parametrize(
    ("recipe", "words", "message"),
    [
        (reg_transformer, "tinny", "'tinny' is unknown; it takes no_retrieval, .*; tiny; machine=cpu"),
        (reg_t5, "tiny,dpo", "'dpo' is unknown"),
        (emprl_t5, "base", "'base' is unknown; it takes flan-t5-small-titles, empathetic-t5-small, a folder"),
        (emprl_llm, "tiny,orpo", "'orpo' is unknown; .* sft, no_kl, .*dailydialog, consensus, tiny"),
        (emprl_transformer, "sfd,dailydialog", "'sfd' is unknown; it takes expected, balanced, sft, .*; dailydialog, "),
        *((lempex, f"tiny,{form}", f"'{form}' is unknown; it takes no_losses, no_exemplars, .*, q=NUMBER")
          for form in ("no_loss", "q=0", "q")),
        (nec, "tiny,no_self_gen", "'no_self_gen' is unknown; it takes t5, scratch, bart; no_contrast, .*"),
        (reg_t5, "base,small", "names two of a kind, 'base' and 'small'"),
        (reg_t5, "sft,no_attributes", "names two of a kind, 'sft' and 'no_attributes'"),
        (lempex, "q=10,q=3", "names two of a kind, '10' and '3'"),
        (emprl_llm, "llama-3.1-8b,machine=v5e:16x16", "'machine=v5e:16x16' is unknown; .*machine=cpu, machine=gpu"),
        (emprl_llm, "smollm2,retrieval", ".*expected, balanced, sft, .*, gspo, .*, trajectory; dailydialog, consensus"),
    ],
)  # fmt: skip
def test_what_is_no_form_is_named_and_not_ignored(recipe, words, message):
    with pytest.raises(ValueError, match=rf"^{recipe.__name__.rpartition('.')[2]}\.py:{words}:? {message}"):
        recipe.get_config(words)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("seed", "0", r"config\.seed = '0' must be int"),
        ("seed", ..., r"the config lacks seed"),
        ("seed", -1, r"config\.seed = -1 must lie in \[0, 2147483647\]"),
        ("seed", 2**31, r"config\.seed = 2147483648 must lie in \[0, 2147483647\]"),
        ("joint.best_metric", "", r"config\.joint: best_metric = '' must be a metric, 'loss', or None"),
        ("reg.decoding.early_stopping", "nevr", r"early_stopping = 'nevr' .* it must be bool\. Or: .* one of 'never'"),
        ("evaluate.split", "tets", r"config\.evaluate: split = 'tets' must be one of train, validation, test"),
        ("index.queries", {"tset": 0}, r"config\.index: queries has 'tset' = 0; it maps train, validation, test"),
        ("index.quality", {"test": -1}, r"config\.index: quality has 'test' = -1; it maps train, validation, test"),
        ("sed", 1, r"config\.sed is not a setting of the run; did you mean 'seed'\?"),
        ("system", "rge", r"config\.system = 'rge' is not a module of empax/systems"),
        ("system", None, r"config\.system = None must be a text"),
        ("reg", ..., r"the config lacks its section config\.reg"),
        ("reg.pasages", 3, r"config\.reg\.pasages is not a setting of RegSettings; did you mean 'passages'\?"),
        ("joint", ..., r"config\.run names 'joint', but there is no config\.joint"),
        ("joint.kind", "trian", r"config\.joint\.kind = 'trian' must be one of prepare, annotate, knowledge, train"),
        ("joint.kind", ..., r"config\.joint lacks kind; it must be one of prepare"),
        ("joint", 3, r"config\.joint = 3 must be a section of settings"),
        ("prepare", "a", r"config\.prepare = 'a' must be a section of settings"),
        ("prepare.kind", ["prepare"], r"config\.prepare\.kind = \['prepare'\] must be one of"),
        ("joint.task", ..., r"config\.joint lacks task, the name of what to train"),
        ("joint.task", ["fid"], r"config\.joint\.task = \['fid'\] must be a text"),
        ("joint.task", "fid", r"config\.joint\.task = 'fid' is unknown; reg has generator, emotions, dense, retr"),
        ("joint.task", "nek.joint", r"config\.joint\.task = 'nek' is not a module"),
        ("joint.task", "attributes.joint", "attributes has classifier"),
        ("joint.hide_response_probability", 1.0, r"config\.joint\.hide_response_probability is not a setting"),
        ("joint.buckets", [8, 4], "must be ascending"),
        ("joint.stpes", 3, r"config\.joint\.stpes is not a setting .* did you mean 'steps'\?"),
        ("joint.batch_size", 12, r"config\.joint: batch_size / .* = 12 cannot be split over 8 devices"),
        ("annotate.classifiers", (), r"classifiers = \(\) must name at least one stage of attributes\.classifier"),
        ("evaluate.stage", ..., r"config\.evaluate lacks stage"),
        ("report.paper_row", "T6", r"paper_row = 'T6' is not a row"),
    ],
)
def test_a_mistake_is_named_before_any_work_starts(config, tmp_path, path, value, message):
    with pytest.raises(ConfigError, match=message):
        run.run(changed(config, {path: value}), tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.fixture
def short(config, monkeypatch):
    """A recipe of two stages that only write down that they ran, and the list where they do."""
    ran = []

    def record(settings, run):
        ran.append(run.stage)
        if run.stage == "second" and ran.count("second") == 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(prepare, "run", record)
    recipe = {name: config[name] for name in ("system", "seed", "data", "reg")}
    kinds = {name: {"kind": "prepare"} for name in ("first", "second", "third")}
    return {**recipe, "run": list(kinds), **kinds}, ran


def test_stages_run_in_order_and_a_broken_one_again(short, tmp_path):
    config, ran = short
    with pytest.raises(KeyboardInterrupt):
        run.run(config, tmp_path)
    assert [(tmp_path / name / "DONE").exists() for name in config["run"]] == [True, False, False]
    run.run(config, tmp_path)
    assert ran == ["first", "second", "second", "third"]
    run.run(config, tmp_path)
    assert len(ran) == 4
    assert read_json(tmp_path / "config.json") == config
    about = read_json(tmp_path / "run.json")
    assert {"python", "platform", "versions", "commit", "seed", "deterministic", "devices", "command"} == set(about)
    assert about["deterministic"] is False


def test_a_stage_that_is_called_after_its_kind_may_leave_it_out(short, tmp_path):
    config, ran = short
    config = {name: value for name, value in config.items() if name not in config["run"]}
    config = {**config, "run": ["prepare"], "prepare": {}}
    whole = {**config, "prepare": {"kind": "prepare"}}
    assert make_plan(config) == make_plan(whole)
    run.run(config, tmp_path)
    run.run(whole, tmp_path)
    assert ran == ["prepare"]
    assert read_json(tmp_path / "config.json") == whole


def test_a_work_directory_of_another_config_names_what_differs(short, tmp_path):
    config, _ = short
    write_json(tmp_path / "config.json", {**config, "seed": 5, "old": {"a": 1}})
    with pytest.raises(ConfigError, match=r"does not fit this version of empax: config\.old is not a setting"):
        run.run(config, tmp_path)
    more = {"kind": "evaluate", "stage": "generator", "split": "validation"}  # a section is not spelled out
    other = {**config, "seed": 5, "profile": True, "run": [*config["run"], "more"], "more": more}
    write_json(tmp_path / "config.json", other)
    named = (
        r"made with another config \(config\.seed: 5 there, 0 here; .*config\.more: \{'kind': .*'generator… there, None"
    )
    with pytest.raises(ConfigError, match=named):
        run.run(config, tmp_path)
