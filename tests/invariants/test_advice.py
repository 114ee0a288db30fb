"""Every advice in an error message works: each case provokes the message, does what it says, and succeeds.

A new message that gives advice needs a test of its module that quotes it, a case here, or a reason in WITHOUT_A_CASE.
"""

import ast
import collections
import dataclasses
import functools
import importlib.util
import itertools
import re
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
import pytest

from configs import lempex, reflectdiffu, reg_transformer
from empax.core.config import ConfigError, to_settings
from empax.core.files import DataError, WorkDir
from empax.core.settings import DataSettings
from empax.core.system import RunContext
from empax.data import bpe, dailydialog, epitome, features, gguf, own, tokenizer_folders
from empax.interop import tensors
from empax.interop.pretrained_encoders import EncoderSettings, load_encoder
from empax.models import bert
from empax.parts.generator.settings import DialogueSettings, GeneratorTaskSettings, QuestionSettings
from empax.pipeline import index as index_stage
from empax.pipeline import run
from empax.pipeline.plan import make_plan, plain
from empax.systems.lempex.settings import LempexSettings, LempexTaskSettings
from tests.own_corpus import write_rows
from tests.plans import changed, plan_of

ROOT = Path(__file__).resolve().parents[2]

VERBS = (
    "set|delete|run|choose|install|pip install|give|use|write|name|put|take|leave|make|raise|lower|shorten|remove|drop|"
    "add|point|restore|export|train|narrow|change|fetch|spell"
)
_ADVICE = re.compile(rf"(?:^|[;:.,(] |, or |\bor |\band )(?:{VERBS})\b", re.IGNORECASE)
_FETCH_AGAIN = re.compile(r"fetch( or convert)? (it|the model|the checkpoint) again", re.IGNORECASE)
"""No test fetches anything; those of the module read a whole file, and damage it."""
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
    config = plain({"reg": reg_transformer, "lempex": lempex, "reflectdiffu": reflectdiffu}[name].get_config("tiny"))
    config["mesh"]["data"] = 1
    return config


def checked(changes, of="reg"):
    """What checking the tiny recipe says, with "a.b" set as `changes` say; the first problem is raised."""

    def check(tools):
        config = changed(_tiny(of), changes)
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


def epitome_folder(tools):
    """Empty stand-ins of the released files, found by their names."""
    for name in epitome.FILES.values():
        tools.write(f"data/{name}", "")
    return tools.tmp / "data"


def without_beam(tools):
    with tools.patch.context() as patch:
        patch.setattr(importlib.util, "find_spec", lambda *_: None)
        own.check_beam(("--x",))


def in_stage(stage, *, config=None):
    return RunContext(WorkDir(Path("nowhere")), plan_of(config or _tiny("reg")), stage)


def tokenizer():
    return bpe.train_bpe(["hello"], vocab_size=300, special_tokens=features.SPECIAL_TOKENS)


def judges_alone():
    """A stage of a run whose system has no encoder."""
    stages = {"prepare": {"kind": "prepare"}, "index": {"kind": "index"}}
    return in_stage("index", config={"system": "attributes", "attributes": {}, "run": list(stages), **stages})


SETTINGS = [
    section(
        EncoderSettings, {},
        "interop/pretrained_encoders.py", "describes `pretrained`; name that too, or set the sizes",
        {"preset": "bert-base"}, {"preset": "bert-base", "pretrained": "minilm"},
    ),
    section(
        DataSettings, {}, "core/settings.py", 'data.beam is for data.name = "jsonl"',
        {"beam": ("--a",)}, {"beam": ("--a",), "name": "jsonl"},
    ),
    section(
        LempexSettings, {}, "systems/lempex/settings.py", "is not supported by LEMPEx; leave it out",
        {"attributes": True}, {},
    ),
    section(
        LempexSettings, {"generator": {"architecture": "t5", "pretrained": "folder"}}, "systems/lempex/settings.py",
        "is not supported by LEMPEx; leave it out", {"form": "plain"}, {},
    ),
    section(
        LempexTaskSettings, {}, "systems/lempex/settings.py", "is not read with losses = ",
        {"soft": "straight_through"}, {},
    ),
    section(
        LempexTaskSettings, {}, "systems/lempex/settings.py", "name stages if losses is", {"losses": "judges"},
        {"losses": "judges", "judges": ("judges",)},
    ),
    section(
        DialogueSettings, {}, "parts/generator/settings.py", 'set generator.pretrained, or form = "dialogue"',
        {"form": "plain"}, {"form": "dialogue"},
    ),
    section(
        QuestionSettings, {"name": "emotion"}, "parts/generator/settings.py", "and text = {}; give both",
        {"text": " "}, {"text": "What do I feel?"},
    ),
]  # fmt: skip

MINILM_JUDGES = {f"{name}.encoder": {"pretrained": "minilm"} for name in ("judges", "sentiment")}
RECIPES = [
    recipe_case(
        "systems/reflectdiffu/intents.py", "make both equal",
        {"reasons.buckets": (20,)}, {"reasons.buckets": (40,)}, of="reflectdiffu",
    ),
    recipe_case(
        "systems/lempex/stages.py", "must judge {} once; name one stage for it, or set its weight to 0",
        {"generator.judges": ("judges", "second_seed")}, {"generator.judges": ("judges",)}, of="lempex",
    ),
    recipe_case(
        "systems/lempex/stages.py", "need one vocabulary; use the tokenizer of the judge's encoder", MINILM_JUDGES,
        {**MINILM_JUDGES, "prepare.tokenizer": {"pretrained": "minilm", "tags": False}}, of="lempex",
    ),
    recipe_case(
        "systems/lempex/__init__.py", "LEMPEx reads encoder states; name a T5",
        {"lempex.generator": {"architecture": "llama", "preset": "tiny"}},
        {"lempex.generator": {"architecture": "t5", "preset": "t5-tiny"}}, of="lempex",
    ),
    recipe_case(
        "parts/exemplars/dense.py", "would learn nothing; set it to 'response'", DENSE,
        {**DENSE, "reg.key": "response"},
    ),
    recipe_case(
        "parts/exemplars/dense.py", "would learn nothing; set it to 'response'",
        {"lempex.key": "exchange"}, {"lempex.key": "response"}, of="lempex",
    ),
    recipe_case(
        "pipeline/evaluate.py", "keep_every_steps to a divisor of a step",
        {"evaluate.step": 99}, {"evaluate.step": 2, "joint.keep_every_steps": 1},
    ),
    Case(
        "pipeline/index.py", "leave that stage out, or name a stage that trains one",
        lambda t: index_stage.check(index_stage.Settings(), judges_alone()),
        lambda t: index_stage.check(index_stage.Settings(encoder="retriever"), in_stage("reindex")),
    ),
    Case(
        "core/system.py", "name a stage that has {}",
        lambda t: in_stage("joint").settings("index", GeneratorTaskSettings),
        lambda t: in_stage("joint").settings("generator", GeneratorTaskSettings),
    ),
    Case(
        "core/system.py", "choose a task of that system", lambda t: judges_alone().shared_settings(DialogueSettings),
        lambda t: in_stage("index").shared_settings(DialogueSettings),
    ),
]  # fmt: skip


def long_corpus(tools, replies):
    """More dialogues than are looked at one by one; the last one has these replies."""
    alone = [{"id": f"{n}", "emotion": "proud", "utterances": ["I won!"]} for n in range(1001)]
    rows = [*alone, {"id": "last", "emotion": "proud", "utterances": ["I won!", *replies]}]
    return write_rows(tools.tmp / "own", *rows)


FILES = [
    file_case(
        "data/dailydialog.py", "turn {} is blank; remove it or the dialogue", dailydialog.load_dialogues,
        "a __eou__ __eou__\n", "a __eou__ b __eou__\n",
    ),
    Case(
        "data/corpora.py", "{} = {} holds no {}; set it to {}", lambda t: epitome.find_epitome(t.tmp),
        lambda t: epitome.find_epitome(epitome_folder(t)),
    ),
    Case(
        "pipeline/prepare.py", "add some with two turns or more",
        lambda t: checked({"data.name": "jsonl", "data.dir": str(long_corpus(t, []))})(t),
        lambda t: checked({"data.name": "jsonl", "data.dir": str(long_corpus(t, ["Well done!"]))})(t),
    ),
    Case(
        "data/own.py", "needs Apache Beam, which is not installed; pip install",
        without_beam, lambda t: own.check_beam(()),
    ),
    pair(
        "interop/pretrained_encoders.py", "num_layers = {}, but {} has {}; lower it",
        lambda layers: load_encoder(
            EncoderSettings(pretrained="minilm", num_layers=layers), None, with_params=False
        ),
        {"layers": 7}, {"layers": 6},
    ),
]  # fmt: skip


def gguf_tokens(**changes):
    metadata = {"model": "gpt2", "tokens": ["a", "b", "ab"], "merges": ["a b"], "eos_token_id": 2, **changes}
    named = {f"tokenizer.ggml.{name}": value for name, value in metadata.items()}
    return gguf.gguf_tokenizer(gguf.GgufFile(Path("m.gguf"), named, ()))


def with_template(tools, content):
    tokenizer().save(tools.tmp / "words")
    (tools.tmp / "words" / "chat_template.jinja").write_bytes(content)
    return tokenizer_folders.load_tokenizer(tools.tmp / "words")


TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)

MODELS = [
    pair(
        "interop/pretrained_encoders.py", "is a decoder, which has no encoder; name a model that has one",
        lambda model: load_encoder(EncoderSettings(pretrained=model), None, with_params=False),
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
    pair(
        "data/gguf.py", "must be {}; fetch or convert the model again", gguf_tokens, {"tokens": [1]}, {},
    ),
    pair(
        "data/gguf.py", "is not one of the {} tokens; fetch or convert it again", gguf_tokens, {"eos_token_id": 3},
        {"eos_token_id": 2},
    ),
    Case(
        "data/chat.py", "is not UTF-8 ({}); save it as UTF-8, or fetch the model again",
        lambda t: with_template(t, TEMPLATE.encode() + "é".encode("latin-1")),
        lambda t: with_template(t, TEMPLATE.encode() + "é".encode()),
    ),
    file_case(
        "interop/tensors.py", "is cut short; fetch it again",
        lambda path: np.asarray(tensors.MappedTensor(path, 0, np.dtype(np.float32), (2,))), "1234567", "12345678",
    ),
]  # fmt: skip


CASES = [*SETTINGS, *RECIPES, *FILES, *MODELS]

_FETCH = "a file is fetched from the network; in its place, tests read a whole one"
_RUN = "a stage is run again, which takes a trained run: too long for this table"
_BEAM = "Apache Beam is an extra; tests/retrieval/test_beam.py follows it"
_KEPT = "tests of adapters in tests/interop follow it, with the oracle for adapters"
_EARLIER = "a recipe that would lead here is refused before any work, by a message that has a case"

_REFUSED = "a combination that tests of the system refuse; what is advised is the recipes' own value"
_OWN = "a test of the module provokes it and follows it, in words that other messages have too"
_PAIRS = "tests/systems/emprl/test_preferences.py follows it"
_RATERS = "tests/rating and tests/test_rate.py follow it"
_FRONT_DOOR = "tests/serving/test_text_model.py and tests/test_api.py follow it, with a model"

WITHOUT_A_CASE = {
    ("api.py", "give at least two to compare"): _FRONT_DOOR,
    ("serve.py", "pip install 'empax[serve]' brings it"): "whoever has what tests need has the extra",
    ("training/sinks.py", "pip install 'empax[{}]' brings it"): "tests/training/test_sinks.py has stand-ins",
    ("decoding/options.py", "generate: "): "tests/decoding/test_options.py follows each",
    ("serving/pairs.py", "give a list of {}"): _FRONT_DOOR,
    ("serving/text_model.py", "give at least one (source, target)"): _FRONT_DOOR,
    ("serving/answering.py", "shorten it"): _FRONT_DOOR,
    ("serving/pairs.py", 'give mappings with "source" and "target"'): _FRONT_DOOR,
    ("data/tokenizer_folders.py", "has no fast version; give the folder of one"): _FETCH,
    ("data/tokenizer_folders.py", "Without network, give the path of the model's folder"): _FETCH,
    ("interop/gguf.py", "give the safetensors"): _FETCH,
    ("data/wheels.py", "but {} is not installed; run `pip install --no-deps {}`"): _OWN,
    ("interop/pretrained.py", "which generates no text; name a generator"): _OWN,
    ("parts/knowledge/sources.py", "has facts about {}, not about {}; set it under"): _OWN,
    ("systems/classic/lexicons.py", "has none of the {} words; give another"): _OWN,
    ("models/decoder_only.py", "shorten them or raise it"): _EARLIER,
    ("models/transformer.py", "shorten them or raise it"): _EARLIER,
    ("pipeline/judging.py", "give the work directory of one that has trained"): _RUN,
    ("pipeline/judging.py", "run its recipe again"): _RUN,
    ("planning/slices.py", "brings libtpu"): "libtpu comes for Linux hosts of TPUs; tests/planning compile with it",
    ("interop/readers.py", "and an adapter beside it"): _KEPT,
    ("parts/generator/parts.py", "in front of the context; set it to 'apart', 'response' or 'turns'"): _REFUSED,
    ("systems/emprl/preferences.py", "give a file with one per line"): _PAIRS,
    ("systems/emprl/settings.py", "set pairs = '', or loss = 'dpo'"): _REFUSED,
    ("rate.py", "leave out --reference"): _RATERS,
    ("rate.py", "pip install 'empax[rate]' brings it"): "an extra is installed",
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
    found = {part for i in range(len(text)) if counts.get(part := text[i : i + 18]) == 1}
    return {said for said, own in runs.items() if own & found}


def test_every_message_with_an_advice_has_a_case():
    followed = {(case.file, case.said) for case in CASES}
    missing = [
        f"{file}: {text}"
        for file, text in messages()
        if _ADVICE.search(_FETCH_AGAIN.sub("", text)) and (file, text) not in quoted()
        if not any(file == of and piece in text for of, piece in (*followed, *WITHOUT_A_CASE))
    ]
    assert not missing, "\n".join(
        ["these advise something that no test follows or quotes in words that they alone have:", *missing]
    )
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
