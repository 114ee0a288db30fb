"""The README.md of an exported model: what it is, how to call it, what it reached, what may be done with it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from empax.data.sources import INSTRUCTION
from empax.evaluation.scoring import METRICS
from empax.pipeline.render import NOTE, TITLES, format_value

_LICENCES = {
    "empathetic_dialogues": (
        "cc-by-nc-4.0",
        "EmpatheticDialogues (Rashkin et al. 2019) is under CC BY-NC 4.0, for non-commercial use; "
        "weights trained on it should be taken to be, too.",
    ),
    "sample": ("apache-2.0", "The built-in sample was written for empax and is under its licence, Apache-2.0."),
}
"""Name of the data → licence as the Hub names it, and a sentence."""

_UNKNOWN = ("other", "The licence of the training data applies; find it out before you pass the model on.")


@dataclasses.dataclass(frozen=True)
class Exported:
    """What the card is about.

    Attributes:
      what: "generator" or "retriever".
      stage: the stage whose checkpoint it is.
      evaluated: the stage that the metrics are of; empty = none.
      format: "transformers" or "empax".
      base: name or folder of the pretrained model that training began with; empty = none.
      passages: how many passages the generator reads at once; 0 = one source.
      prompted: whether the generator is a decoder-only model, prompted by a chat template.
      size: number of parameters.
    """

    what: str
    stage: str
    evaluated: str
    format: str
    base: str
    passages: int
    size: int
    prompted: bool = False


def model_card(about: Exported, config: Mapping[str, Any], report: Mapping[str, Any] | None) -> str:
    """The card as Markdown with the Hub's front matter.

    Args:
      about: the model.
      config: of the run, resolved.
      report: `report.json` of the run; None = it has none.
    """
    data = config["data"]["name"]
    licence, sentence = _LICENCES.get(data, _UNKNOWN)
    base = Path(about.base).name if Path(about.base).is_absolute() else about.base
    parts = [
        _front_matter(about, licence, base),
        f"# {config['system'].upper()} {about.what}\n",
        f"The {about.what} of stage `{about.stage}` of a run of the system `{config['system']}` with empax, "
        f"{about.size:,} parameters" + (f", begun from `{base}`" if base else "") + ".\n",
        "## Use\n",
        _use(about),
        "## Data\n",
        _data(data, report),
        "## Results\n",
        _results(about, report),
        "## Training\n",
        _training(config, report),
        "## Licence\n",
        sentence + (f" The licence of `{base}` applies as well." if base else "") + "\n",
    ]
    return "\n".join(parts)


def _front_matter(about: Exported, licence: str, base: str) -> str:
    library = {"generator": "transformers", "retriever": "sentence-transformers"}[about.what]
    lines = ["---", "language: en", f"license: {licence}"]
    lines.append(f"library_name: {library if about.format == 'transformers' else 'empax'}")
    if about.what == "retriever":
        lines.append("pipeline_tag: sentence-similarity")
    if base and base == about.base and "/" in base:  # a name on the Hub
        lines.append(f"base_model: {base}")
    return "\n".join([*lines, "tags:", "- empathetic-dialogue", "- empax", "---", ""])


def _use(about: Exported) -> str:
    if about.format == "empax":
        call = "from empax.interop.export import load_exported\n\nmodel, params = load_exported(Path(FOLDER))"
        return f"```python\n{call}\n```\n"
    if about.what == "retriever":
        call = (
            "from sentence_transformers import SentenceTransformer\n\n"
            'vectors = SentenceTransformer(FOLDER).encode(["I lost my job.", "We won the cup!"])'
        )
        about_texts = (
            "A query is the turns of a context, joined by single spaces; a key is the same with the response "
            "behind it. The dot product is the relevance."
        )
        return f"```python\n{call}\n```\n\n{about_texts}\n"
    if about.prompted:
        call = (
            "from transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
            "tokenizer, model = AutoTokenizer.from_pretrained(FOLDER), AutoModelForCausalLM.from_pretrained(FOLDER)\n"
            f'turns = [("system", "{INSTRUCTION}"), ("user", "I lost my job.")]\n'
            'chat = [{"role": role, "content": content} for role, content in turns]\n'
            "prompt = tokenizer.apply_chat_template(\n"
            '    chat, add_generation_prompt=True, return_tensors="pt", return_dict=True\n)\n'
            "answer = model.generate(**prompt)[0, prompt.input_ids.shape[1] :]\n"
            "print(tokenizer.decode(answer, skip_special_tokens=True))"
        )
        shown = f" It was trained with {about.passages} exemplars behind the instruction." if about.passages else ""
        return f"```python\n{call}\n```\n\nAdapters are merged into the weights.{shown}\n"
    call = (
        "from transformers import AutoModelForSeq2SeqLM, AutoTokenizer\n\n"
        "tokenizer, model = AutoTokenizer.from_pretrained(FOLDER), AutoModelForSeq2SeqLM.from_pretrained(FOLDER)\n"
        'source = tokenizer("<speaker> I lost my job.", add_special_tokens=False, return_tensors="pt")\n'
        "print(tokenizer.decode(model.generate(source.input_ids)[0], skip_special_tokens=True))"
    )
    layout = (
        "A source is `[attributes] <speaker> … <listener> … <speaker> … <sep> [attributes] exemplar`; attributes are "
        "tokens such as `<sentiment:low>`, and everything but the turns may be absent. No end token is added."
    )
    if about.passages:
        layout += (
            f" Trained as Fusion-in-Decoder: each of {about.passages} sources holds the context beside one exemplar, "
            "is encoded apart, and the decoder reads all states, one behind the other (`encoder_outputs=`)."
        )
    return f"```python\n{call}\n```\n\n{layout}\n"


def _data(name: str, report: Mapping[str, Any] | None) -> str:
    lines = [f"`{name}`.", ""]
    found = {name: counts for name, counts in (report["data"] if report else {}).items() if isinstance(counts, Mapping)}
    for split, counts in found.items():
        numbers = ", ".join(f"{count:,} {unit}" for unit, count in counts.items() if isinstance(count, int))
        lines.append(f"- {split}: {numbers or counts}")
    return "\n".join(lines).rstrip() + "\n"


def _results(about: Exported, report: Mapping[str, Any] | None) -> str:
    metrics = report["metrics"] if report else {}
    if not metrics:
        return "This run has no report.\n"
    lines = [f"Of the run on its test split, decoded with stage `{about.evaluated}`."]
    if about.stage != about.evaluated:
        lines = [f"Of the whole run, which answered with stage `{about.evaluated}`, not with this model."]
    lines += ["", "| metric | value | 95% interval |", "| --- | --- | --- |"]
    for name in METRICS:
        if name in metrics:
            value, low, high = (_number(name, metrics[name][key]) for key in ("value", "low", "high"))
            lines.append(f"| {TITLES[name]} | {value} | {low} to {high} |")
    return "\n".join([*lines, "", NOTE.split(". ", maxsplit=1)[0] + ".", ""])


def _number(name: str, value: float | None) -> str:
    return "–" if value is None else format_value(name, value)


def _training(config: Mapping[str, Any], report: Mapping[str, Any] | None) -> str:
    run = report["run"] if report else {}
    lines = [f"Seed {config['seed']}, stages {', '.join(config['run'])}."]
    if "versions" in run:
        versions = ", ".join(f"{name} {version}" for name, version in run["versions"].items() if version)
        lines += ["", f"Versions: {versions}" + (f"; commit {run['commit']}." if run["commit"] else ".")]
    if "command" in run:
        lines += ["", f"```bash\n{run['command']}\n```"]
    return "\n".join(lines) + "\n"
