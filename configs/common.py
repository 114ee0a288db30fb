"""Shared code of the recipes: parsing of their arguments, common sections, and shrinking for trials."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict


@dataclasses.dataclass(frozen=True)
class Arguments:
    """The arguments after the colon of `--config=RECIPE:WORD,WORD,KEY=VALUE`, in any order.

    Attributes:
      model: a name that the recipe knows, or a folder; empty = not given.
      form: the paper's system (empty), an ablation or a baseline.
      machine: the machine for `budget`; empty = not given.
      flags: the other words.
      numbers: values of "KEY=NUMBER".
    """

    model: str = ""
    form: str = ""
    machine: str = ""
    flags: frozenset[str] = frozenset()
    numbers: Mapping[str, int] = dataclasses.field(default_factory=dict)

    @property
    def tiny(self) -> bool:
        return "tiny" in self.flags


def arguments(
    text: str,
    recipe: str,
    *,
    models: Sequence[str] = (),
    folders: bool = False,
    forms: Sequence[str] = (),
    flags: Sequence[str] = ("tiny",),
    machines: Sequence[str] = (),
    numbers: Sequence[str] = (),
) -> Arguments:
    """Reads the arguments of a recipe.

    Args:
      text: the arguments.
      recipe: the name of its file, for messages.
      models: its models.
      folders: whether a model may also be a folder.
      forms: its forms.
      flags: words that may accompany any form.
      machines: values of "machine=".
      numbers: keys with a positive integer value.

    Raises:
      ValueError: a word is unknown, or two exclude each other.
    """
    found: dict[str, str] = {}
    given = set()
    for word in filter(None, (part.strip() for part in text.split(","))):
        key, equals, value = word.partition("=")
        if key == "machine" and equals and value in machines:
            kind, name = "machine", value
        elif word in forms:
            kind, name = "form", word
        elif word in flags:
            given.add(word)
            continue
        elif key in numbers and value.isdecimal() and int(value) > 0:
            kind, name = key, value
        elif word in models or (folders and Path(word).expanduser().is_dir()):
            kind, name = "model", word
        else:
            named = [*models, *(["a folder with a model"] if folders else [])]
            values = [*(f"machine={machine}" for machine in machines), *(f"{key}=NUMBER" for key in numbers)]
            known = "; ".join(", ".join(words) for words in (named, forms, flags, values) if words) or "no argument"
            raise ValueError(f"{recipe}:{text}: {word!r} is unknown; it takes {known}.")
        if found.setdefault(kind, name) != name:
            raise ValueError(f"{recipe}:{text} names two of a kind, {found[kind]!r} and {name!r}; leave one out.")
    if "tiny" in given and "machine" in found:
        raise ValueError(f"{recipe}:{text}: a trial is sized for any machine; leave out machine={found['machine']}.")
    counts = {key: int(found.pop(key)) for key in numbers if key in found}
    return Arguments(**found, flags=frozenset(given), numbers=counts)


def check_together(text: str, recipe: str, forms: Sequence[str], read: Callable[[Sequence[str]], Any]) -> None:
    """Refuses forms that contradict each other, or one that has no effect with the others.

    A form that leaves something out ("no_...") may have no effect.

    Args:
      text: the arguments, for messages.
      recipe: the name of its file, for messages.
      forms: the chosen forms.
      read: returns the settings that a run of given forms reads, as sections.

    Raises:
      ValueError: two forms set a setting to different values, or one changes no setting that is read.
    """
    if len(forms) < 2:
        return
    plain, whole = _flat(read(())), _flat(read(forms))
    alone = {form: _flat(read((form,))) for form in forms}
    for first, second in itertools.combinations(forms, 2):
        one, other = alone[first], alone[second]
        for path in sorted(one.keys() & other.keys() - {"run"}):
            if one[path] != other[path] and plain.get(path) not in (one[path], other[path]):
                raise ValueError(
                    f"{recipe}:{text}: {first!r} and {second!r} contradict each other: {path} is {one[path]!r} with "
                    f"one and {other[path]!r} with the other; leave one out."
                )
    for form in (form for form in forms if not form.startswith("no_")):
        others = tuple(other for other in forms if other != form)
        if _flat(read(others)) == whole:
            guilty = [other for other in others if _flat(read((form, other))) == alone[other]] or list(others)
            raise ValueError(
                f"{recipe}:{text}: {form!r} changes nothing beside {' and '.join(map(repr, guilty))}; leave one of "
                "them out."
            )


def _flat(sections: Any, path: str = "") -> dict[str, Any]:
    """Returns settings by path, such as "generator.losses"."""
    if not isinstance(sections, (Mapping, ConfigDict)):
        return {path: sections}
    inner = (_flat(value, f"{path}.{name}" if path else name) for name, value in sections.items())
    return {name: value for found in inner for name, value in found.items()}


def base(*, system: str, data: str, seed: int = 0) -> ConfigDict:
    """Returns an empty recipe: system, data, seed."""
    config = ConfigDict()
    config.system = system
    config.seed = seed
    config.mesh = ConfigDict({"data": -1, "fsdp": 1, "tensor": 1})  # -1: all remaining devices
    # For --mode=plan: "gpu", "v5e:16x16", "v5p:4x4x4", ...; the training stages, empty = all.
    config.plan = ConfigDict({"topology": "", "stages": ()})
    config.profile = False  # True: each training stage traces a few updates into STAGE/profile
    config.sinks = ()  # trackers besides metrics.jsonl and TensorBoard: wandb, mlflow, trackio
    config.deterministic = False  # True: bitwise reproducible runs on a GPU; a step takes 1.7 times as long on an H200
    config.data = ConfigDict({"name": data, "dir": "", "moel_compat": False, "limit": 0})
    return config


def train(*, task: str, learning_rate: float, **more: Any) -> ConfigDict:
    """Returns a training stage; `more` are settings of the loop or of the task."""
    optimizer = {"learning_rate": learning_rate, "clip_norm": 1.0, **more.pop("optimizer", {})}
    return ConfigDict({"kind": "train", "task": task, "optimizer": optimizer, **more}, convert_dict=True)


def linear(warmup_steps: int, **more: Any) -> dict[str, Any]:
    """Returns an optimizer with linear warm-up for `warmup_steps` and linear decay to 0; `more` are its settings."""
    return {"warmup_steps": warmup_steps, "schedule": "linear", **more}


def sizes(*, steps: int, batch_size: int, evaluations: int, **more: Any) -> dict[str, Any]:
    """Returns steps, batch size and intervals of a training stage; `more` are settings of the loop."""
    rhythm = {"eval_every_steps": steps // evaluations, "checkpoint_every_steps": 200, "log_every_steps": 50}
    return {"steps": steps, "batch_size": batch_size, **rhythm, **more}


def on_gpu(config: ConfigDict, *, lengths: int = 1, remat: str = "none") -> None:
    """Adapts a recipe to a GPU without changing what it trains.

    On an H200 a scan over layers takes 1.6 times as long as unrolled layers, and 1.5 times the memory. Each further
    padded length costs at least 20 seconds of compilation. Exact search of a corpus takes under a millisecond.

    Args:
      config: the recipe with its sizes; modified in place.
      lengths: the number of longest buckets to keep in each stage.
      remat: rematerialisation in generators, see `models.scanned.rematerialized`: none if memory allows.
    """
    for name in config.run:
        section = config.get(name, {})
        if "buckets" in section:
            section.buckets = section.buckets[-lengths:]
        if section.get("store", {}).get("method") == "scann":
            section.store.method = "exact"
    for name, model in _models(config):
        model.update({"unroll": 12, "remat": remat if name == "generator" else "none"})


def _models(section: ConfigDict) -> Iterator[tuple[str, ConfigDict]]:
    """Yields the sections of models with layers; stages of the same name have a kind."""
    for name, value in section.items():
        if isinstance(value, ConfigDict):
            if name in ("generator", "retriever", "encoder", "selector") and "kind" not in value:
                yield name, value
            yield from _models(value)


CONSENSUS = {
    "method": "sample",
    "num_samples": 16,
    "temperature": 0.57,
    "rerank": "consensus",
    "rerank_length": 0.35,
    "max_tokens": 30,
    "no_repeat_ngram": 3,
}
"""Ours, by validation (PAPERS.md): of 16 samples, the one most similar to the others, with about human length."""


T5_CONSENSUS = {**CONSENSUS, "no_repeat_ngram": 4}
"""The same for the tokens of T5 and BERT, which split "I'm" into three.

A ban on three lets no reply say "I'm" twice: it goes on with "I've" or "I'd" instead, whatever that makes it say.
"""


def decode_alike(config: ConfigDict, chosen: Arguments, decoding: Mapping[str, Any] = CONSENSUS) -> ConfigDict:
    """Selects the leaderboard's decoder for evaluation if "consensus" is given; training does not change.

    `decoding` is CONSENSUS, or T5_CONSENSUS for such tokens.
    """
    if "consensus" in chosen.flags:
        few = {"num_samples": 2, "max_tokens": 8} if chosen.tiny else {}
        config.evaluate.decoding = ConfigDict({**decoding, **few})
    return config


SCRATCH_STEPS = 4000
"""Updates of a model from scratch on two cores, of 32 responses each (3.2 epochs); REG's two stages have 4,050."""

ONE_EPOCH = 1250
"""Updates of a pretrained NEC or LEMPEx on two cores: of 32 responses each, all of them once."""

ON_CPU = {"dtype": "bfloat16", "unroll": 6}
"""Settings of a model on two cores: a quarter to a half of the time of float32 in a plain scan."""

SCRATCH = {
    "d_model": 256,
    "num_heads": 4,
    "head_dim": 64,
    "d_ff": 1024,
    # An encoder reads K passages, a decoder only one response, so that depth is cheaper in the decoder.
    "num_encoder_layers": 3,
    "num_decoder_layers": 4,
    "dropout": 0.1,
    "embeddings": "minilm",
}
"""A generator from scratch, for two cores."""

SMALL_ENCODER = {"d_model": 32, "num_heads": 2, "d_ff": 64, "num_layers": 2}
FEW_STEPS = {"steps": 4, "log_every_steps": 2, "eval_every_steps": 2, "checkpoint_every_steps": 2}
"""Steps of a trial."""


def frozen(pattern: str) -> dict[str, Any]:
    """Returns a group of frozen parameters."""
    return {"pattern": pattern, "frozen": True}


FIXED_EMBEDDING = frozen("encoder/token_embedding$")
"""A parameter group for pretrained encoders: word embeddings are half of MiniLM, and a few steps change them little."""

POSITIONS = {"pattern": "relative_bias$", "learning_rate_scale": 10.0}
"""A parameter group for the relative positions of a Transformer from scratch; ours.

Adam moves an entry of the bias by at most the learning rate in an update, but it must grow by several units. At update
700 of `reg_transformer.py:no_retrieval`, the validation loss of one seed is 4.009 nats a token with a random initial
bias, 3.977 with ALiBi's slopes, 3.956 with this group and 3.944 with both (results/trials/relative_positions.json).
"""


def index(*, encoder: str, candidates: int, queries: dict[str, int] | None = None, method: str = "scann") -> ConfigDict:
    """Returns an index stage; `encoder` is the stage that trained the encoder, empty = pretrained."""
    settings = {"kind": "index", "encoder": encoder, "store": {"method": method}, "candidates": candidates}
    return ConfigDict(settings if queries is None else {**settings, "queries": queries})


def seq2seq(model: str, *, data: str, buckets: tuple[int, ...], **models: Any) -> ConfigDict:
    """Returns a recipe that fine-tunes a pretrained model on plain texts, without its stage "generator".

    Args:
      model: name or folder of the model.
      data: the corpus.
      buckets: padded lengths of sources in evaluation.
      models: further settings of the section "seq2seq".
    """
    config = base(system="seq2seq", data=data)
    config.run = ("prepare", "generator", "evaluate", "report")
    generator = {"architecture": "pretrained", "pretrained": model}
    config.seq2seq = ConfigDict({"generator": generator, "form": "plain", **models})
    config.prepare = ConfigDict({"kind": "prepare", "tokenizer": {"pretrained": model, "tags": False}})
    config.evaluate = ConfigDict({"kind": "evaluate", "stage": "generator", "buckets": buckets, "judge": ""})
    config.report = ConfigDict({"kind": "report"})
    return config


def swaps(**more: Any) -> ConfigDict:
    """Returns a stage that measures the effect of exemplars: likelihoods and some replies, with six kinds of them."""
    return ConfigDict({"kind": "swaps", "evaluation": "evaluate", "replies": 500, **more})


def shrink(config: ConfigDict, *, pretrained: bool = False) -> ConfigDict:
    """Shrinks a recipe to seconds: the built-in sample, random small models, a few steps.

    Args:
      config: the recipe; modified in place.
      pretrained: whether generator, tokenizer and the attributes' encoder are left unchanged.
    """
    config.data.name = "sample"
    models = config[config.system]
    if not pretrained:
        size = {"d_model": 32, "num_heads": 2, "head_dim": 16, "d_ff": 64}
        models.generator.update(
            {**size, "num_encoder_layers": 2, "num_decoder_layers": 2, "unroll": 1, "embeddings": ""}
        )
        config.prepare.tokenizer = ConfigDict({"vocab_size": 600})
    if "retriever" in models:
        models.retriever = ConfigDict({**SMALL_ENCODER, "normalize": True, "dropout": 0.0})
    models.decoding = ConfigDict({"method": "greedy", "max_tokens": 12})
    # One length everywhere, since compilation for each shape takes most of a trial's time.
    models.layout.update(
        {
            "max_context_tokens": 32,
            "max_passage_tokens": 32,
            "max_target_tokens": 16,
            "max_query_tokens": 16,
            "max_key_tokens": 16,
        }
    )
    if "passages" in models:
        models.passages = 2
    for name in config.run:
        section = config[name]
        kind = section.get("kind", name)
        if kind == "train":
            section.update({**FEW_STEPS, "batch_size": 8, "accumulate": 1, "buckets": (80,)})
            if "refresh_every_steps" in section:
                section.refresh_every_steps = 2
        if section.get("candidates"):
            section.candidates = 4
        if kind == "index":
            section.queries = ConfigDict({"train": 0, "validation": 0})
        if kind == "swaps":
            section.update({"rows": 16, "replies": 8, "nearest": ""})
    if "attributes" in config:
        config.attributes.update({"data": "sample", "max_tokens": 16, "buckets": (16,)})
        if not pretrained:
            config.attributes.encoder = ConfigDict(SMALL_ENCODER)
    config.evaluate.update({"buckets": (80,), "batch_size": 16})
    return config
