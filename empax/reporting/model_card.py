"""The README.md of an exported model, made from model_card.md: description, usage, results, licence and limits."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jinja2

from empax.data.chat import PLAIN
from empax.data.chat_prompts import INSTRUCTION
from empax.data.sources import ExemplarLayout
from empax.data.wheels import NAMED
from empax.evaluation.scoring import METRICS
from empax.interop.peft import base_for_peft
from empax.models.lora import LoraSettings
from empax.reporting.content import NOTE
from empax.reporting.tables import TITLES, format_value

_LICENCES = {
    "empathetic_dialogues": (
        "cc-by-nc-4.0",
        "EmpatheticDialogues (Rashkin et al. 2019) is under CC BY-NC 4.0, for non-commercial use; "
        "treat weights trained on it in the same way.",
    ),
    "sample": ("apache-2.0", "The built-in sample was written for empax and is under its licence, Apache-2.0."),
}
"""Name of the data, all English → the Hub's name of the licence, and a sentence."""

_UNKNOWN = ("other", "The licence of the training data applies; look it up before you pass the model on.")

_MESSAGE = "I lost my job."
_COUNTED = (
    "`generate` also counts the prompt for `no_repeat_ngram_size` and `repetition_penalty`; the run counted the answer "
    "alone."
)


@dataclasses.dataclass(frozen=True)
class Exported:
    """The exported model that the card describes.

    Attributes:
      what: "generator" or "retriever".
      stage: the stage of the checkpoint.
      evaluated: the stage of the metrics, with the step if other parameters answered; empty = none.
      base: name or folder of the pretrained model that training started from; empty = none.
      passages: number of exemplars that the generator reads with a source; 0 = none.
      exemplars: their layout, see `data.sources.ExemplarLayout`.
      before: text that starts each source.
      prompted: whether the generator is a decoder-only model.
      template: whether its tokenizer has a chat template.
      plain: whether the generator reads plain texts, without tags or an instruction.
      size: number of parameters.
      lora: settings of the trained adapters; None = the weights themselves were trained.
      adapters: whether the folder holds only the adapters; else they are merged into the weights.
      rounded: whether the base weights had fewer bits in training than the weights of `base`.
      key: content of a retriever's keys, "exchange" or "response".
      towers: "separate" if queries and keys have separate encoders.
      evaluated_by: decoding setting of the metrics if the folder's differs; else empty.
    """

    what: str
    stage: str
    evaluated: str
    base: str
    passages: int
    size: int
    exemplars: ExemplarLayout = "apart"
    before: str = ""
    prompted: bool = False
    template: bool = True
    plain: bool = False
    lora: LoraSettings | None = None
    adapters: bool = False
    rounded: bool = False
    key: str = "exchange"
    towers: str = "shared"
    evaluated_by: str = ""

    @property
    def base_name(self) -> str:
        """`base`; for a folder only its name, since its path is private."""
        return Path(self.base).name if Path(self.base).is_absolute() else self.base


def model_card(about: Exported, config: Mapping[str, Any], report: Mapping[str, Any] | None) -> str:
    """Returns the card as Markdown with the Hub's front matter; `report` is the run's `report.json`, or None."""
    run = report["run"] if report else {}
    chat = [*([] if about.plain else [("system", INSTRUCTION)]), ("user", _MESSAGE)]
    framed = PLAIN.opened(INSTRUCTION) + PLAIN.continued([_MESSAGE], INSTRUCTION)
    templates = jinja2.Environment(
        loader=jinja2.PackageLoader("empax.reporting", ""), undefined=jinja2.StrictUndefined, trim_blocks=True,
        lstrip_blocks=True, keep_trailing_newline=True,
    )  # fmt: skip
    return templates.get_template("model_card.md").render(
        about=about,
        config=config,
        head=_front_matter(about, config, report),
        auto="AutoModelForCausalLM" if about.prompted else "AutoModelForSeq2SeqLM",
        beneath=repr(about.base) if _on_hub(about) else "BASE",
        message=_MESSAGE,
        turns=json.dumps(chat),
        prompt=json.dumps(_MESSAGE if about.plain else framed),
        notes=_notes(about),
        data=_data(report),
        test_set=report["test_set"] if report else {},
        rows=_results(report),
        note=NOTE.split(". ", maxsplit=1)[0] + ".",
        beyond=_beyond(about, config[config["system"]]),
        versions=[f"{name} {version}" for name, version in run.get("versions", {}).items() if version],
        commit=run.get("commit"),
        command=run.get("command"),
        licence=_licence(config)[1],
    )


def _licence(config: Mapping[str, Any]) -> tuple[str, str]:
    return _LICENCES.get(config["data"]["name"], _UNKNOWN)


def _on_hub(about: Exported) -> bool:
    """Whether `base` is a name on the Hub."""
    return about.base_name == about.base and "/" in about.base


def _front_matter(about: Exported, config: Mapping[str, Any], report: Mapping[str, Any] | None) -> str:
    from huggingface_hub import EvalResult, ModelCardData  # imported here because it is slow

    library = {"generator": "transformers", "retriever": "sentence-transformers"}[about.what]
    library = "peft" if about.adapters else library
    own = about.what == "generator" and about.stage == about.evaluated
    test_set = report["test_set"] if report else {"title": "", "split": ""}
    # The Hub shows only results with a split.
    metrics = report["metrics"] if report and own and test_set["split"] else {}
    about_data = {
        "task_type": "text-generation",
        "dataset_type": config["data"]["name"],
        "dataset_name": test_set["title"],
        "dataset_split": test_set["split"],
    }
    results = [
        EvalResult(**about_data, metric_type=name, metric_name=TITLES[name], metric_value=metrics[name]["value"])
        for name in METRICS
        if name in metrics and metrics[name]["value"] is not None
    ]
    card = ModelCardData(
        language="en" if config["data"]["name"] in _LICENCES else None,  # else unknown
        license=_licence(config)[0],
        library_name=library,
        pipeline_tag="sentence-similarity" if about.what == "retriever" else None,
        base_model=about.base if _on_hub(about) else None,
        tags=["empathetic-dialogue", "empax", *(["lora"] if about.adapters else [])],
        model_name=f"{config['system'].upper()} {about.what}" if results else None,
        eval_results=results or None,
    )
    return card.to_yaml()


def _notes(about: Exported) -> str:
    """Describes the model's input, and its adapters."""
    if about.what == "retriever":
        key = "a response alone" if about.key == "response" else "the same with the response behind it"
        texts = (
            f"A query is the turns of a context, joined by single spaces; a key is {key}. "
            "The dot product is the relevance."
        )
        if about.towers == "separate":
            texts += " Two encoders were exported apart: `--what=retriever` for queries, `key_retriever` for keys."
        return texts
    counted = _COUNTED if about.prompted and (about.template or not about.plain) else ""
    return " ".join(filter(None, (_on_adapters(about), counted, _layout(about))))


def _on_adapters(about: Exported) -> str:
    if about.lora is None:
        return ""
    if not about.adapters:
        return "Adapters are merged into the weights."
    note = f"The adapters are of rank {about.lora.rank}, alpha {about.lora.alpha:g}."
    if about.base in NAMED:
        note += f" {base_for_peft(about.base)}"
    elif not _on_hub(about):
        note += f" `BASE` is where `{about.base_name}` lies."
    if about.rounded:
        note += (
            " The weights beneath them were rounded to few bits while they were trained: answers may differ a little."
        )
    return note


def _layout(about: Exported) -> str:
    """Describes the model's input."""
    if about.plain:
        if about.prompted and about.template:
            return ""
        layout = (
            "A source is a text as the tokenizer encodes it. The turns of a conversation are lines of it, or have "
            '" | " between them if the tokenizer has no line break.'
        )
        if about.passages:
            layout += f" Trained as Fusion-in-Decoder on {about.passages} passages: that, behind one exemplar each."
        return layout
    if about.prompted and about.passages:
        if about.exemplars == "turns":
            return f"It reads {about.passages} exemplars as earlier turns of the chat."
        return f"It was trained with {about.passages} exemplars behind the instruction."
    if about.prompted:
        return ""
    layout = (
        f"A source is `{about.before}<speaker> … <listener> … <speaker> …`. "
        if about.before
        else "A source is `[attributes] <speaker> … <listener> … <speaker> …`; attributes are tokens such as "
        "`<sentiment:low>`, and everything but the turns may be absent. "
    )
    layout += (
        "The tokenizer's own special tokens stand around every passage (`</s>` behind those of a T5)."
        if about.base
        else "No end token is added."
    )
    if not about.passages:
        return layout
    turns = "<speaker> … <listener> …" if about.exemplars == "joined" else "<exemplar_speaker> … <exemplar_listener> …"
    turns = "<exemplar_listener> …" if about.exemplars == "response" else turns
    if about.exemplars in ("apart", "response"):
        layout += f" Trained as Fusion-in-Decoder on {about.passages + 1} passages: that, and each exemplar,"
    else:
        layout += f" Trained as Fusion-in-Decoder on {about.passages} passages: that, `<sep>`, and one exemplar each,"
    return (
        f"{layout} `[attributes] {turns}`. They are encoded apart, and the decoder reads all states, one behind the "
        "other (`encoder_outputs=`)."
    )


def _data(report: Mapping[str, Any] | None) -> list[str]:
    """Returns a line on each split."""
    lines = []
    for split, counts in (report["data"] if report else {}).items():
        if not isinstance(counts, Mapping):
            continue
        if "source" in counts:  # from a stage that found facts
            lines.append(f"{split}: facts from {counts['source']}")
            continue
        numbers = ", ".join(f"{count:,} {unit}" for unit, count in counts.items() if isinstance(count, int))
        lines.append(f"{split}: {numbers or counts}")
    return lines


def _results(report: Mapping[str, Any] | None) -> list[list[str]]:
    """Returns name, value and interval of each metric."""
    metrics = report["metrics"] if report else {}
    rows: list[list[str]] = []
    for name in METRICS:
        if name in metrics:
            known = (metrics[name][key] for key in ("value", "low", "high"))
            value, low, high = ("–" if one is None else format_value(name, one) for one in known)
            rows.append([TITLES[name], value, f"{low} to {high}"])
    return rows


def _beyond(about: Exported, settings: Mapping[str, Any]) -> str:
    """Describes what the run does with the model beyond the folder."""
    if about.evaluated_by:
        return f"The run was evaluated with the decoding of `{about.evaluated_by}`; this folder has the system's own."
    decoding, share = settings.get("decoding", {}), settings.get("emotion_share", 0.0)
    if about.what == "generator" and decoding.get("rerank"):
        return f"The run chooses one of several answers: `{json.dumps(decoding)}`. `generate` does not re-rank."
    if about.what == "retriever" and share:
        return (
            f"In the run {share:g} of a score is the probability that a context has the exemplar's emotion, by an "
            "encoder that is not part of this folder."
        )
    return ""
