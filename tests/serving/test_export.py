"""From a work directory to folders: which stage, which model, which card. Nothing is trained."""

import dataclasses
import json
import re
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from configs.reg_transformer import get_config
from empax.core.config import ConfigError
from empax.core.files import WorkDir, read_json, write_json
from empax.core.manifest import describe, files_of, write_sealed
from empax.core.system import RunContext
from empax.core.tree import named_leaves
from empax.data.bpe import train_bpe
from empax.data.features import SPECIAL_TOKENS
from empax.data.tokenizer_folders import load_tokenizer
from empax.decoding.settings import DecodeSettings
from empax.interop.export import Generation, export_generator
from empax.interop.huggingface import load_pretrained
from empax.models.bert import BertEncoder
from empax.models.dual_encoder import DualEncoder
from empax.models.heads import EMOTION_HEAD
from empax.models.lora import LoraSettings, init_adapters
from empax.models.t5 import t5_config
from empax.models.transformer import EncoderDecoder
from empax.parts.exemplars.parts import RetrievalParts
from empax.pipeline.plan import make_plan, plain
from empax.pipeline.records import settings_hash
from empax.reporting.model_card import Exported, model_card
from empax.serving import export
from empax.serving.export import ExportSettings, export_run
from empax.training.checkpoint import Checkpointer, CheckpointError

METRICS = {
    "bleu_1": {"value": 24.1, "low": 23.0, "high": 25.25},
    "perplexity": {"value": None, "low": None, "high": None},
}
TEST_SET = {"split": "test", "title": "the built-in sample, test split, 6 rows"}
ABOUT = Exported("generator", "joint", "joint", "", 2, 10)
CONFIG = {"system": "reg", "data": {"name": "sample"}, "run": (), "seed": 0, "reg": {"decoding": {}}}
REPORT = {"metrics": METRICS, "data": {}, "run": {}, "test_set": TEST_SET}


def initial(model, seed, *inputs):
    """Parameters by their shapes alone: nothing is compiled."""
    shapes = jax.eval_shape(model.init, jax.random.key(0), *inputs)["params"]
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda leaf: jnp.asarray(rng.normal(size=leaf.shape), leaf.dtype), shapes)


def save(directory, params):
    checkpointer = Checkpointer(directory)
    checkpointer.save_best(1, params, 0.0)
    checkpointer.close()


def emotion(seed, width):
    return initial(EMOTION_HEAD, seed, jnp.zeros((1, width)))


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A work directory whose generator is a tiny T5, whose stages hold what they began with, and the parameters."""
    root = tmp_path_factory.mktemp("export")
    tokenizer = train_bpe(["we won the cup", "i lost my job"], vocab_size=300, special_tokens=SPECIAL_TOKENS)
    sizes = {"vocab_size": tokenizer.vocab_size, "d_model": 16, "d_kv": 8, "num_heads": 2, "d_ff": 24, "num_layers": 1}
    start = {"decoder_start_token_id": tokenizer.start_id}
    model = EncoderDecoder(t5_config(sizes | start))
    ids = jnp.zeros((1, 2), int)
    base = initial(model, 0, ids, ids == 0, ids)
    decoding = DecodeSettings("greedy", max_tokens=9)
    generation = Generation(dataclasses.asdict(decoding), tokenizer.start_id, 1, 0)
    export_generator(root / "tiny-t5", model, base, tokenizer, generation)

    config = plain(get_config("tiny"))
    config["reg"]["generator"] = {"architecture": "t5", "pretrained": str(root / "tiny-t5")}
    files = WorkDir(root / "run")
    write_json(files.config, config)
    tokenizer.save(files.tokenizer)
    encoder = RetrievalParts.of(
        RunContext(files, make_plan(config), "export"), tokenizer, with_params=False
    ).encoder.model
    assert isinstance(encoder, DualEncoder)
    assert isinstance(encoder.encoder, BertEncoder)

    def retriever(seed):
        return {"encoder": initial(encoder, seed, ids, ids == 0), "emotion": emotion(seed, 32)}

    def generator(seed):
        return {"model": initial(model, seed, ids, ids == 0, ids), "emotion": emotion(seed, 16)}

    stages = {
        "generator": generator(1),
        "retriever": retriever(2),
        "joint": {"generator": generator(3), "retriever": retriever(4)},
    }
    for name, params in stages.items():
        save(files.stage(name), params)
    write_sealed(files.stage("joint") / "result.json", {"step": 1, "best_step": 1})
    described = describe(files.root, files_of(files, "joint"))
    settings = settings_hash(make_plan(config).stages["joint"])
    write_sealed(files.done("joint"), {"files": described, "settings": settings, "result": "", "built_on": {}})
    return files, stages


def same(one, two):
    one, two = named_leaves(one), named_leaves(two)
    return one.keys() == two.keys() and all(np.array_equal(one[name], two[name]) for name in one)


@pytest.mark.parametrize(
    ("stage", "what", "pick"),
    [
        ("", "", lambda stages: stages["joint"]["generator"]["model"]),
        ("generator", "", lambda stages: stages["generator"]["model"]),
        ("joint", "retriever", lambda stages: stages["joint"]["retriever"]["encoder"]["encoder"]),
        ("retriever", "", lambda stages: stages["retriever"]["encoder"]["encoder"]),
    ],
)
def test_the_model_that_was_asked_for_is_written(made, stage, what, pick, tmp_path):
    files, stages = made
    line = export_run(files.root, tmp_path / "out", ExportSettings(stage=stage, what=what, max_shard_bytes=4000))
    assert len(list((tmp_path / "out").glob("model-*.safetensors"))) > 1
    assert same(load_pretrained(tmp_path / "out").params, pick(stages))
    assert ("has not finished" in line) == (stage in ("generator", "retriever"))


def test_an_encoder_of_responses_alone_keeps_the_start_of_a_long_text(made, tmp_path, monkeypatch):
    files, _ = made
    found = export._trained(files.root, ExportSettings(stage="retriever"))
    for what, side in (("retriever", "left"), ("key_retriever", "right")):
        monkeypatch.setattr(export, "_trained", lambda *_, what=what: (*found[:2], what, found[3]))
        export_run(files.root, tmp_path / what, ExportSettings(stage="retriever"))
        assert read_json(tmp_path / what / "tokenizer_config.json")["truncation_side"] == side


def test_config_and_generation_are_those_of_the_run(made, tmp_path):
    files, _ = made
    export_run(files.root, tmp_path / "out", ExportSettings())
    fields = read_json(tmp_path / "out" / "generation_config.json")
    assert (fields["max_new_tokens"], fields["num_beams"], fields["do_sample"]) == (12, 1, False)
    assert (fields["decoder_start_token_id"], fields["eos_token_id"], fields["pad_token_id"]) == (2, 1, 0)
    export_run(files.root, tmp_path / "two", ExportSettings(what="retriever"))
    assert read_json(tmp_path / "two" / "sentence_bert_config.json")["max_seq_length"] == 16
    assert read_json(tmp_path / "two" / "config.json")["num_hidden_layers"] == 2


def test_the_card_tells_what_the_report_knows(made, tmp_path):
    files, _ = made
    report = files.root / "report.json"
    run = {"versions": {"empax": "0.1.0", "torch": ""}, "commit": "abc", "command": "python -m empax.main --x"}
    data = {"source_hash": "f00", "train": {"dialogues": 1256, "instances": 5}}
    write_json(report, {"metrics": METRICS, "data": data, "run": run, "test_set": TEST_SET})
    try:
        export_run(files.root, tmp_path / "out", ExportSettings())
        export_run(files.root, tmp_path / "two", ExportSettings(what="retriever", stage="retriever"))
    finally:
        report.unlink()
    card = (tmp_path / "out" / "README.md").read_text()
    head = card.split("---\n")[1]
    assert "license: apache-2.0" in head
    assert "library_name: transformers" in head
    assert "base_model" not in head  # a folder is no name on the Hub
    for part in (
        "| BLEU-1 | 24.10 | 23.00 to 25.25 |",
        "| PPL / token | – | – to – |",
        "Over the built-in sample, test split, 6 rows, decoded with stage `joint`.",
        "- train: 1,256 dialogues, 5 instances",
        "```bash\npython -m empax.main --x\n```",
        "empax 0.1.0; commit abc.",
        "begun from `tiny-t5`",
        "Fusion-in-Decoder on 3 passages: that, and each exemplar",
    ):
        assert part in card, part
    assert str(files.root.parent) not in card
    card = (tmp_path / "two" / "README.md").read_text()
    assert "answered with stage `joint`, not with this model" in card
    assert "SentenceTransformer(FOLDER)" in card
    assert "library_name: sentence-transformers" in card


def test_the_head_of_a_card_has_the_metrics_of_this_model_alone():
    from huggingface_hub import ModelCard

    head = ModelCard(model_card(ABOUT, CONFIG, REPORT)).data
    (found,) = head.eval_results  # perplexity is no number
    assert (found.metric_type, found.metric_name, found.metric_value) == ("bleu_1", "BLEU-1", 24.1)
    assert (found.dataset_type, found.task_type, head.model_name) == ("sample", "text-generation", "REG generator")
    assert (head.license, head.tags) == ("apache-2.0", ["empathetic-dialogue", "empax"])
    for other in ({"stage": "generator"}, {"what": "retriever"}):
        card = model_card(dataclasses.replace(ABOUT, **other), CONFIG, REPORT)
        assert not ModelCard(card).data.eval_results


def test_a_card_says_over_which_rows_its_metrics_are():
    from huggingface_hub import ModelCard

    title = "the built-in sample, validation split, 4 rows"
    card = model_card(ABOUT, CONFIG, {**REPORT, "test_set": {"split": "validation", "title": title}})
    (found,) = ModelCard(card).data.eval_results
    assert (found.dataset_type, found.dataset_split, found.dataset_name) == ("sample", "validation", title)
    assert f"Over {title}, decoded" in card
    assert "test split" not in card
    card = model_card(ABOUT, CONFIG, {**REPORT, "test_set": {"split": "", "title": "corpus not known, 4 rows"}})
    assert not ModelCard(card).data.eval_results
    assert "| BLEU-1 | 24.10 |" in card


@pytest.mark.parametrize(
    ("about", "said"),
    [
        ({"passages": 0, "before": "Reply: "}, "A source is `Reply: <speaker> … <listener> … <speaker> …`. No end"),
        ({"passages": 0, "before": "Reply: "}, 'tokenizer("Reply: <speaker> I lost my job.", add_special_tokens=False'),
        ({"base": "a/b"}, 'tokenizer("<speaker> I lost my job.", return_tensors="pt")'),
        ({"passages": 0}, "A source is `[attributes] <speaker> … <listener> … <speaker> …`; attributes are"),
        ({"base": "a/b"}, "special tokens stand around every passage (`</s>` behind those of a T5). Trained as"),
        ({"exemplars": "apart"}, "on 3 passages: that, and each exemplar, `[attributes] <exemplar_speaker> … <exempla"),
        ({"exemplars": "response"}, "on 3 passages: that, and each exemplar, `[attributes] <exemplar_listener> …`."),
        ({"exemplars": "joined"}, "on 2 passages: that, `<sep>`, and one exemplar each, `[attributes] <speaker> … <li"),
        ({"prompted": True, "exemplars": "turns"}, "It reads 2 exemplars as earlier turns of the chat.\n"),
        ({"prompted": True}, "It was trained with 2 exemplars behind the instruction.\n"),
        ({"prompted": True, "passages": 0}, 'turns = [["system", "You talk with somebody'),
        ({"prompted": True, "passages": 0}, "the run counted the answer alone.\n"),
        ({"prompted": True, "template": False, "passages": 0}, r"\n\nThey:\nI lost my job.\n\nYou:\n"),
        ({"prompted": True, "template": False, "plain": True, "passages": 0}, 'prompt = tokenizer("I lost my job.",'),
        ({"prompted": True, "plain": True, "passages": 0}, 'turns = [["user", "I lost my job."]]\n'),
        ({"plain": True, "passages": 0}, 'source = tokenizer("I lost my job.", return_tensors="pt")\n'),
        ({"plain": True}, "on 2 passages: that, behind one exemplar each.\n"),
        ({"what": "retriever"}, "pipeline_tag: sentence-similarity\n"),
        ({"what": "retriever"}, "a key is the same with the response behind it. The dot product is the relevance.\n"),
        ({"what": "retriever", "key": "response", "towers": "separate"}, "a key is a response alone. The dot product"),
        ({"what": "retriever", "towers": "separate"}, "`--what=retriever` for queries, `key_retriever` for keys."),
        ({"base": "a/b"}, "begun from `a/b`.\n"),
        ({"base": "a/b"}, "base_model: a/b\n"),
        ({"base": "a/b"}, "The licence of `a/b` applies as well."),
        ({"base": "a/b", "lora": LoraSettings(rank=2), "adapters": True}, "from_pretrained('a/b'), FOLDER)"),
        ({"base": "/home/me/b", "lora": LoraSettings(rank=2), "adapters": True}, "`BASE` is where `b` lies."),
        ({"base": "smollm2", "lora": LoraSettings(rank=2), "adapters": True},
         "`BASE` is the folder that `empax.load('smollm2').save('BASE')` writes."),
        ({"base": "a/b", "lora": LoraSettings(rank=2), "adapters": True, "rounded": True}, "were rounded to few bits"),
    ],
)  # fmt: skip
def test_a_card_says_what_the_model_reads_and_stands_on(about, said):
    card = model_card(dataclasses.replace(ABOUT, **about), CONFIG, None)
    assert said in card
    assert ("Fusion-in-Decoder" in card) == (about.get("passages") != 0 and not {"what", "prompted"} & about.keys())
    assert ("pipeline_tag" in card) == ("what" in about)
    assert ("Two encoders" in card) == ("towers" in about)
    assert ("rounded" in card) == ("rounded" in about)
    assert ("BASE" in card) == (about.get("base", "a/b") != "a/b")
    assert ("counted the answer" in card) == ("prompted" in about and not {"template", "plain"} <= about.keys())
    assert "plain" not in about or "<speaker>" not in card
    assert about.get("template", True) or "apply_chat_template" not in card


def test_a_card_names_licence_and_language_of_the_data_if_they_are_known_and_where_facts_are_from():
    card = model_card(ABOUT, CONFIG | {"data": {"name": "empathetic_dialogues"}}, None)
    for part in ("license: cc-by-nc-4.0\n", "language: en\n", "non-commercial", "This run has no report."):
        assert part in card
    report = {**REPORT, "data": {"train": {"dialogues": 1256, "instances": 5}, "knowledge": {"source": "WordNet"}}}
    card = model_card(ABOUT, CONFIG | {"data": {"name": "jsonl"}}, report)
    assert "license: other\n" in card
    assert "language:" not in card
    assert "look it up before you pass the model on." in card
    assert "- knowledge: facts from WordNet\n" in card


@pytest.mark.filterwarnings("ignore")  # of transformers' imports
@pytest.mark.parametrize(
    ("options", "made_names"),
    [
        ({}, {"answer"}),
        ({"what": "retriever"}, {"vectors"}),
    ],
    ids=str,
)
def test_the_example_of_a_card_runs(options, made_names, made, tmp_path):
    files, _ = made
    export_run(files.root, tmp_path / "out", ExportSettings(**options))
    names = {"FOLDER": str(tmp_path / "out")}
    exec(re.search(r"```python\n(.*?)```", (tmp_path / "out" / "README.md").read_text(), re.DOTALL)[1], names)
    assert made_names <= set(names)


def test_the_card_says_what_the_run_does_beyond_the_model():
    settings = {"decoding": {"num_samples": 16, "rerank": "consensus"}, "emotion_share": 0.5}
    for changes, said in (
        ({}, '`{"num_samples": 16, "rerank": "consensus"}`. `generate` does not re-rank.'),
        ({"evaluated_by": "config.evaluate.decoding"}, "decoding of `config.evaluate.decoding`; this folder has the"),
        ({"what": "retriever"}, "0.5 of a score is the probability that a context has the exemplar's emotion"),
    ):
        about = dataclasses.replace(ABOUT, **changes)
        card = model_card(about, {**CONFIG, "reg": settings}, None)
        assert said in card
        assert ("The run chooses" in card) == (not changes)
        assert said not in model_card(about, CONFIG, None) or "evaluated_by" in changes


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, None),
        ({"decoding": {"method": "sample", "rerank": "consensus", "num_samples": 4}}, "`config.{main}.decoding`"),
        ({"step": 3}, "answered with stage `{stage}, step 3`, not with this model"),
    ],
    ids=["as exported", "decoder", "step"],
)
def test_the_card_of_a_run_that_was_evaluated_otherwise_says_so(changes, said, made, tmp_path):
    files, _ = made
    config = read_json(files.config)
    main = next(name for name in config["run"] if config[name].get("kind") == "evaluate")
    other = WorkDir(shutil.copytree(files.root, tmp_path / "run"))
    config[main].update(changes)
    write_json(other.config, config)
    write_json(other.root / "report.json", REPORT)
    export_run(other.root, tmp_path / "out", ExportSettings())
    card = (tmp_path / "out" / "README.md").read_text()
    if said:
        assert said.format(main=main, stage=config[main]["stage"]) in card
    assert (f"decoded with stage `{config[main]['stage']}`" in card) == ("step" not in changes)
    assert (f"`config.{main}.decoding`" in card) == ("decoding" in changes)


@pytest.fixture
def adapted(made, tmp_path):
    """The same run with adapters in place of its generator's weights, and the adapters."""
    files, stages = made
    config = read_json(files.config)
    config["reg"]["lora"] = {"rank": 2, "pattern": "attention/query$"}
    config["reg"]["generator"]["dtype"] = "bfloat16"  # training rounds what it keeps; what is written is not rounded
    other = WorkDir(tmp_path / "adapted")
    write_json(other.config, config)
    base = load_pretrained(files.root.parent / "tiny-t5").params
    adapters = init_adapters(jax.random.key(0), base, LoraSettings(**config["reg"]["lora"]))
    adapters = jax.tree.map(lambda leaf: leaf + 0.1, adapters)
    trained = {"retriever": stages["joint"]["retriever"], "generator": {"emotion": emotion(3, 16)}}
    save(other.stage("joint"), {"adapters": {"generator": {"model": adapters}}, "trained": trained})
    load_tokenizer(files.tokenizer).save(other.tokenizer)
    return other, base, adapters


def test_adapters_are_written_alone_or_merged(adapted, tmp_path):
    files, base, adapters = adapted
    line = export_run(files.root, tmp_path / "out", ExportSettings(lora="adapters"))
    size = 3 * (16 * 2 + 2 * 16)  # three attentions
    assert f"wrote the generator's adapters of stage joint, {size} parameters" in line
    written = safetensors.numpy.load_file(tmp_path / "out" / "adapter_model.safetensors")
    assert len(written) == 6
    assert sum(array.size for array in written.values()) == size
    fields = read_json(tmp_path / "out" / "adapter_config.json")
    assert (fields["r"], fields["task_type"], fields["base_model_name_or_path"]) == (2, "SEQ_2_SEQ_LM", "tiny-t5")
    assert read_json(tmp_path / "out" / "generation_config.json")["max_new_tokens"] == 12
    assert not (tmp_path / "out" / "config.json").exists()
    card = (tmp_path / "out" / "README.md").read_text()
    for part in ("library_name: peft", "- lora", f"{size} parameters of adapters", "weights of `tiny-t5`", "PeftModel",
                 "rank 2, alpha 16.", "AutoModelForSeq2SeqLM.from_pretrained(BASE)",
                 "Fusion-in-Decoder on 3 passages: that, and each exemplar"):  # fmt: skip
        assert part in card, part
    assert str(files.root.parent) not in card

    export_run(files.root, tmp_path / "merged", ExportSettings())
    merged = named_leaves(load_pretrained(tmp_path / "merged").params)
    query, pair = "encoder/layers/attention/query", adapters["encoder"]["layers"]["attention"]["query"]
    expected = named_leaves(base)[query] + 8.0 * jnp.einsum("ldr,lrhn->ldhn", pair["a"], pair["b"])
    np.testing.assert_allclose(merged[query], expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(merged["token_embedding"], base["token_embedding"])
    assert "Adapters are merged into the weights." in (tmp_path / "merged" / "README.md").read_text()


def test_adapters_alone_cannot_hold_rows_that_were_added(adapted, tmp_path):
    files, _, _ = adapted
    load_tokenizer(files.tokenizer, extra_tokens=["<new>"]).save(files.tokenizer)
    with pytest.raises(ConfigError, match=r"added 1 rows to the embedding of tiny-t5, .* --lora=merged"):
        export_run(files.root, tmp_path / "out", ExportSettings(lora="adapters"))
    export_run(files.root, tmp_path / "merged", ExportSettings())
    size = load_tokenizer(files.tokenizer).vocab_size
    assert load_pretrained(tmp_path / "merged").params["token_embedding"].shape == (size, 16)


def test_adapters_alone_cannot_hold_rows_of_tags_that_the_base_lacks(adapted, tmp_path, monkeypatch):
    monkeypatch.setattr("empax.interop.peft.new_tokens", lambda tokenizer, folder: {7: [1, 2]})
    with pytest.raises(ConfigError, match=r"has set 1 rows of the embedding of tiny-t5, .* --lora=merged"):
        export_run(adapted[0].root, tmp_path / "out", ExportSettings(lora="adapters"))


def test_what_cannot_be_exported_says_why(made, tmp_path):
    files, _ = made
    out = tmp_path / "out"
    for asked, message in (
        ({"stage": "evaluate"}, r"'evaluate' trains no model .* are generator, exemplars, retriever, joint\."),
        ({"stage": "generator", "what": "retriever"},
         "holds no retriever, only its generator; stages that do: exemplars, retriever, joint"),
        ({"lora": "adapters"}, r"the generator of stage 'joint' has no adapters: .* --lora=merged"),
        ({"lora": "adapters", "what": "retriever"}, "the retriever of stage 'joint' has no adapters"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=message):
            export_run(files.root, out, ExportSettings(**asked))
    with pytest.raises(ConfigError, match="holds no run"):
        export_run(tmp_path / "nowhere", out, ExportSettings())
    bare = tmp_path / "bare"
    write_json(bare / "config.json", read_json(files.config))
    with pytest.raises(CheckpointError, match=r"best holds no complete checkpoint; run the stage 'joint' first"):
        export_run(bare, out, ExportSettings())
    assert not out.exists()
    out.mkdir()
    (out / "mine.txt").write_text("keep")
    with pytest.raises(ConfigError, match=r"not empty: it holds mine\.txt"):
        export_run(files.root, out, ExportSettings())
    assert [path.name for path in out.iterdir()] == ["mine.txt"]


def test_the_command_line(made, command, tmp_path):
    files, _ = made
    result = command("-m", "empax.export", f"--workdir={files.root}", f"--out={tmp_path / 'out'}", "--what=retriever")
    assert result.returncode == 0, result.stderr
    assert "wrote the retriever of stage joint" in result.stdout
    assert json.loads((tmp_path / "out" / "config.json").read_text())["model_type"] == "bert"
    result = command("-m", "empax.export", f"--workdir={files.root}", f"--output={tmp_path / 'out'}", "--stage=joined")
    assert result.returncode == 2
    assert "Traceback" not in result.stderr
    assert "is not empty" in result.stderr
