"""The README.md of an exported model: description, usage, results, licence and limits."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from empax.data.chat import PLAIN
from empax.data.chat_prompts import INSTRUCTION
from empax.data.sources import ExemplarLayout
from empax.decoding.settings import DecodeSettings
from empax.evaluation.scoring import METRICS
from empax.models.lora import LoraSettings
from empax.reporting.content import NOTE
from empax.reporting.tables import TITLES, format_value, markdown_table

_LICENCES = {
    "empathetic_dialogues": (
        "cc-by-nc-4.0",
        "EmpatheticDialogues (Rashkin et al. 2019) is under CC BY-NC 4.0, for non-commercial use; "
        "treat weights trained on it in the same way.",
    ),
    "sample": ("apache-2.0", "The built-in sample was written for empax and is under its licence, Apache-2.0."),
}
"""Name of the data → the Hub's name of the licence, and a sentence."""

_UNKNOWN = ("other", "The licence of the training data applies; look it up before you pass the model on.")

_LIMITS = (
    "For research on empathetic dialogue. It is no therapy, no counselling and no crisis line: replies imitate what "
    "people wrote, prejudices included, and nobody reads the messages. Nothing in this folder watches for "
    "messages that speak of self-harm or danger; `python -m empax.chat` answers some of them with a fixed text. Encode "
    "what users write with `split_special_tokens=True`, or they can write control tokens.\n"
)


@dataclasses.dataclass(frozen=True)
class Exported:
    """The exported model that the card describes.

    Attributes:
      what: "generator" or "retriever".
      stage: the stage of the checkpoint.
      evaluated: the stage of the metrics; empty = none.
      base: name or folder of the pretrained model that training started from; empty = none.
      passages: number of exemplars that the generator reads with a source; 0 = none.
      exemplars: their layout, see `data.sources.ExemplarLayout`.
      before: text that starts each source.
      framed: whether each passage has the tokenizer's special tokens around it.
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
    framed: bool = False
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
    data = config["data"]["name"]
    licence, sentence = _LICENCES.get(data, _UNKNOWN)
    base, what = about.base_name, about.what
    if about.adapters:
        what = f"{what}, low-rank adapters"
    parts = [
        _front_matter(about, config, licence, report),
        f"# {config['system'].upper()} {what}\n",
        f"The {about.what} of stage `{about.stage}` of a run of the system `{config['system']}` with empax, "
        f"{about.size:,} parameters" + _begun_from(about) + ".\n",
        "## Use\n",
        _use(about),
        "## Data\n",
        _data(data, report),
        "## Results\n",
        _results(about, report) + _beyond(about, config[config["system"]]) + _counted(about, config[config["system"]]),
        "## Training\n",
        _training(config, report),
        "## Intended use and limits\n",
        _LIMITS,
        "## Licence\n",
        sentence + (f" The licence of `{base}` applies as well." if base else "") + "\n",
    ]
    return "\n".join(parts)


def _on_hub(about: Exported) -> bool:
    """Whether `base` is a name on the Hub."""
    return about.base_name == about.base and "/" in about.base


def _begun_from(about: Exported) -> str:
    if about.adapters:
        return f" of adapters, which sit on the weights of `{about.base_name}`"
    return f", begun from `{about.base_name}`" if about.base else ""


def _front_matter(about: Exported, config: Mapping[str, Any], licence: str, report: Mapping[str, Any] | None) -> str:
    from huggingface_hub import EvalResult, ModelCardData  # imported here because it is slow

    library = {"generator": "transformers", "retriever": "sentence-transformers"}[about.what]
    library = "peft" if about.adapters else library
    own = report is not None and about.what == "generator" and about.stage == about.evaluated
    test_set = _test_set(report)
    # The Hub shows only results with a split.
    metrics = report["metrics"] if report is not None and own and test_set["split"] else {}
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
        language="en",
        license=licence,
        library_name=library,
        pipeline_tag="sentence-similarity" if about.what == "retriever" else None,
        base_model=about.base if _on_hub(about) else None,
        tags=["empathetic-dialogue", "empax", *(["lora"] if about.adapters else [])],
        model_name=f"{config['system'].upper()} {about.what}" if results else None,
        eval_results=results or None,
    )
    return f"---\n{card.to_yaml()}\n---\n"


def _test_set(report: Mapping[str, Any] | None) -> Mapping[str, str]:
    """Returns `split` and `title` of the metrics' rows; older reports lack them."""
    return (report or {}).get("test_set", {"split": "", "title": "rows that the report does not tell"})


def _use(about: Exported) -> str:
    if about.what == "retriever":
        call = (
            "from sentence_transformers import SentenceTransformer\n\n"
            'vectors = SentenceTransformer(FOLDER).encode(["I lost my job.", "We won the cup!"])'
        )
        key = "a response alone" if about.key == "response" else "the same with the response behind it"
        about_texts = (
            f"A query is the turns of a context, joined by single spaces; a key is {key}. "
            "The dot product is the relevance."
        )
        if about.towers == "separate":
            about_texts += (
                " Two encoders were exported apart: `--what=retriever` for queries, `key_retriever` for keys."
            )
        return f"```python\n{call}\n```\n\n{about_texts}\n"
    call = _loading(about) + _answering(about)
    notes = " ".join(filter(None, (_on_adapters(about), _layout(about))))
    return f"```python\n{call}\n```\n\n{notes}".rstrip() + "\n"


_MESSAGE = "I lost my job."
_CHAT = (
    "turns = {turns}\n"
    'chat = [{{"role": role, "content": content}} for role, content in turns]\n'
    "prompt = tokenizer.apply_chat_template(\n"
    '    chat, add_generation_prompt=True, return_tensors="pt", return_dict=True\n)\n'
)
_CONTINUATION = "answer = model.generate(**prompt)[0, prompt.input_ids.shape[1] :]\n"
_ANSWER = (
    'source = tokenizer("{before}<speaker> I lost my job.", {bare}return_tensors="pt")\n'
    "answer = model.generate(input_ids=source.input_ids)[0]\n"
)
_PLAIN_ANSWER = f'source = tokenizer("{_MESSAGE}", return_tensors="pt")\nanswer = model.generate(**source)[0]\n'


def _answering(about: Exported) -> str:
    """Returns code lines that print the answer to one message."""
    if not about.prompted:
        bare = "" if about.framed else "add_special_tokens=False, "
        lines = _PLAIN_ANSWER if about.plain else _ANSWER.format(before=about.before, bare=bare)
    elif about.template:
        system = [] if about.plain else [("system", INSTRUCTION)]
        lines = _CHAT.format(turns=json.dumps([*system, ("user", _MESSAGE)])) + _CONTINUATION
    else:
        framed = PLAIN.opened(INSTRUCTION) + PLAIN.continued([_MESSAGE], INSTRUCTION)
        text = json.dumps(_MESSAGE if about.plain else framed)
        lines = f'prompt = tokenizer({text}, return_tensors="pt")\n{_CONTINUATION}'
    return lines + "print(tokenizer.decode(answer, skip_special_tokens=True))"


def _loading(about: Exported) -> str:
    """Returns code lines that load `tokenizer` and `model`, with the decoding settings of the run."""
    name = "AutoModelForCausalLM" if about.prompted else "AutoModelForSeq2SeqLM"
    if not about.adapters:
        return (
            f"from transformers import {name}, AutoTokenizer\n\n"
            f"tokenizer, model = AutoTokenizer.from_pretrained(FOLDER), {name}.from_pretrained(FOLDER)\n"
        )
    base = repr(about.base) if _on_hub(about) else "BASE"
    return (
        "from peft import PeftModel\n"
        f"from transformers import {name}, AutoTokenizer, GenerationConfig\n\n"
        "tokenizer = AutoTokenizer.from_pretrained(FOLDER)\n"
        f"model = PeftModel.from_pretrained({name}.from_pretrained({base}), FOLDER)\n"
        "model.generation_config = GenerationConfig.from_pretrained(FOLDER)\n"
    )


def _on_adapters(about: Exported) -> str:
    if about.lora is None:
        return ""
    if not about.adapters:
        return "Adapters are merged into the weights."
    note = f"The adapters are of rank {about.lora.rank}, alpha {about.lora.alpha:g}."
    if not _on_hub(about):
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
        if about.framed
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


def _data(name: str, report: Mapping[str, Any] | None) -> str:
    lines = [f"`{name}`.", ""]
    found = {name: counts for name, counts in (report["data"] if report else {}).items() if isinstance(counts, Mapping)}
    for split, counts in found.items():
        if "source" in counts:  # from a stage that found facts
            lines.append(f"- {split}: facts from {counts['source']}")
            continue
        numbers = ", ".join(f"{count:,} {unit}" for unit, count in counts.items() if isinstance(count, int))
        lines.append(f"- {split}: {numbers or counts}")
    return "\n".join(lines).rstrip() + "\n"


def _results(about: Exported, report: Mapping[str, Any] | None) -> str:
    metrics = report["metrics"] if report else {}
    if not metrics:
        return "This run has no report.\n"
    how = f"decoded with stage `{about.evaluated}`"
    if about.stage != about.evaluated:
        how = f"by the whole run, which answered with stage `{about.evaluated}`, not with this model"
    lines = [f"Over {_test_set(report)['title']}, {how}."]
    rows = []
    for name in METRICS:
        if name in metrics:
            known = (metrics[name][key] for key in ("value", "low", "high"))
            value, low, high = ("–" if one is None else format_value(name, one) for one in known)
            rows.append([TITLES[name], value, f"{low} to {high}"])
    lines += ["", *markdown_table(["metric", "value", "95% interval"], rows)]
    return "\n".join([*lines, "", NOTE.split(". ", maxsplit=1)[0] + ".", ""])


def _beyond(about: Exported, settings: Mapping[str, Any]) -> str:
    """Describes what the run does with the model beyond the folder."""
    if about.evaluated_by:
        return (
            f"\nThe run was evaluated with the decoding of `{about.evaluated_by}`; this folder has the system's own.\n"
        )
    decoding, share = settings.get("decoding", {}), settings.get("emotion_share", 0.0)
    if about.what == "generator" and decoding.get("rerank"):
        chosen = {
            "consensus": "the one that the others agree with most",
            "similarity": "a likely one whose encoding is near that of the context",
            "random": "one of them at random",
        }[decoding["rerank"]]
        if decoding["method"] == "beam":
            found, given = f"finds {decoding.get('num_beams', DecodeSettings.num_beams)}", "the best by its score"
        else:
            found, given = f"draws {decoding.get('num_samples', DecodeSettings.num_samples)}", "them all"
        return f"\nThe run {found} answers and gives {chosen}; `generate` returns {given}.\n"
    if about.what == "retriever" and share:
        return (
            f"\nIn the run {share:g} of a score is the probability that a context has the exemplar's emotion, by an "
            "encoder that is not part of this folder.\n"
        )
    return ""


_COUNTED = {"no_repeat_ngram": "no_repeat_ngram_size", "repetition_penalty": "repetition_penalty"}
"""Our names of options that look at the answer alone in a chat, and theirs, which count the prompt, too."""


def _counted(about: Exported, settings: Mapping[str, Any]) -> str:
    """Names the decoding options that count the prompt in transformers, but not in the run."""
    given, off = settings.get("decoding", {}), DecodeSettings()
    names = [
        f"`{theirs}`" for ours, theirs in _COUNTED.items() if given.get(ours, getattr(off, ours)) != getattr(off, ours)
    ]
    text = about.plain and not about.template  # the answer continues it
    if not names or not about.prompted or text:
        return ""
    return f"\nIn the run, {' and '.join(names)} counted the answer alone; `generate` also counts the prompt.\n"


def _training(config: Mapping[str, Any], report: Mapping[str, Any] | None) -> str:
    run = report["run"] if report else {}
    lines = [f"Seed {config['seed']}, stages {', '.join(config['run'])}."]
    if "versions" in run:
        versions = ", ".join(f"{name} {version}" for name, version in run["versions"].items() if version)
        lines += ["", f"Versions: {versions}" + (f"; commit {run['commit']}." if run["commit"] else ".")]
    if run.get("command"):
        lines += ["", f"```bash\n{run['command']}\n```"]
    return "\n".join(lines) + "\n"
