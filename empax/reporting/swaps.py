"""The effect of exemplars: the tables of the stages "swaps"."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from empax.core.files import DataError, WorkDir, read_json, read_jsonl
from empax.core.manifest import remedy
from empax.core.types import Prediction
from empax.data.dialogues import instance_from_row
from empax.evaluation.retrieval import RECALL_AT
from empax.evaluation.swaps import BESIDE, PARTS, meaning, score_swaps
from empax.reporting.charts import intervals
from empax.reporting.controls import Table
from empax.reporting.tables import metric_title

Report = Mapping[str, Any]

TITLE = "What the exemplars are worth"

_GIVEN = {
    "own": "its own",
    "random": "random",
    "same_turn": "random, same turn",
    "same_emotion": "random, same emotion",
    "nearest": "nearest to the gold reply",
    "none": "none",
}
_READERS = {"own": "this system's retriever", "minilm": "MiniLM as pretrained", "bm25": "BM25"}


def score_stages(files: WorkDir, config: Mapping[str, Any], *, samples: int, seed: int) -> dict[str, Any]:
    """Returns for every swaps stage of the run its swaps.json and the result of `score_swaps` on its rows.

    Raises:
      DataError: a file is damaged, or its rows do not match.
    """
    found = {}
    for name in config["run"]:
        path = files.stage(name) / "swaps.jsonl.gz"
        if not path.exists():
            continue
        about = read_json(path.with_name("swaps.json"))
        instances = map(instance_from_row, read_jsonl(files.instances(about["split"])))
        references = {i.id: Prediction(i.context, "", i.response, id=i.id) for i in instances}
        try:
            scores = score_swaps(list(read_jsonl(path)), references, samples=samples, seed=seed)
        except DataError as error:
            raise DataError(f"{path}: {error} {remedy(name)}") from error
        given = about.pop("given")
        found[name] = {**about, **scores, "given_about": given, "meaning": meaning(scores)}
    return found


def tables(report: Report) -> list[Table]:
    """Returns for every stage tables of the likelihoods, their parts of a reply, the replies, and the retriever."""
    made = []
    for name, found in report["swaps"].items():
        made += by_part(found, TITLE if len(report["swaps"]) == 1 else f"{TITLE}: {name}").values()
    return made


def by_part(found: Mapping[str, Any], title: str = TITLE) -> dict[str, Table]:
    """Returns a stage's tables: "likelihoods", "parts", and if it has them, "replies" and "recall"."""
    made = {"likelihoods": _likelihoods(title, found), "parts": _parts(title, found)}
    if found["replies"]:
        made["replies"] = _replies(title, found)
    if "recall" in found:
        made["recall"] = _recall(found)
    return made


def beside_none(reports: Mapping[str, Report]) -> Table:
    """Returns a table of each kind of exemplars against none in several runs by name: seeds of one recipe."""
    found = {name: next(iter(report["swaps"].values())) for name, report in reports.items()}
    first = next(iter(found.values()))
    rows = [
        [_GIVEN[name], *(_difference(one["given"][name].get("minus_none", {}), "nll") for one in found.values())]
        for name, _ in _in_order(first["given"])
        if name != "none"
    ]
    counts = [f"{one['rows']:,}" for one in found.values()]
    over = f"{counts[0]} references" if len({*counts}) == 1 else f"{' / '.join(counts)} references, column by column"
    note = (
        f"Nats per reply, compared with no exemplars, over {over}. Each column is one model. Differences are paired, "
        "with 95% intervals over dialogues."
    )
    return Table(TITLE, note, ["given", *(f"− none, {name}" for name in found)], rows)


def _likelihoods(title: str, found: Mapping[str, Any]) -> Table:
    rows = []
    for name, cells in _in_order(found["given"]):
        own, none = (cells.get(f"minus_{other}", {}) for other in BESIDE)
        rows.append(
            [
                _GIVEN[name],
                f"{cells['nll']['value']:.3f}",
                _difference(own, "nll"),
                _difference(none, "nll"),
                f"{cells['nll_per_token']['value']:.4f}",
                _difference(own, "nll_per_token", 4),
                f"{cells['exemplar_f1']['value']:.1f}" if "exemplar_f1" in cells else "–",
            ]
        )
    columns = ["NLL / reply ↓", "− its own", "− none", "NLL / token ↓", "− its own, a token", "F1 with the reference"]
    data = found["data"]
    chosen = f" of {data['answered']:,} answered ones" if data["rows"] < data["answered"] else ""
    counts = {_GIVEN[name]: one["with_too_few"] for name, one in found["given_about"].items()}
    short = [f"{name}: {count:,}" for name, count in counts.items() if count]
    note = (
        f"{found['meaning']} Negative log-likelihoods of {found['rows']:,} references{chosen} in nats, by one model "
        f"(stage {found['stage']}) that reads {found['exemplars']} exemplars from the training split, never from the "
        "row's own dialogue or situation. Same turn: as many turns before the reply. Same emotion: the gold emotion of "
        f"the dialogue. Nearest to the gold reply: an oracle, by vectors of {_reader(found['nearest'])}. Differences "
        "are paired, with 95% intervals over dialogues, which do not cover the variation between training seeds."
        + (f" Rows with fewer exemplars: {'; '.join(short)}." if short else "")
        + "".join(f" {_GIVEN[name]} is absent: {why}." for name, why in found["absent"].items())
    )
    return Table(title, note, ["given", *columns], rows)


def _parts(title: str, found: Mapping[str, Any]) -> Table:
    rows = []
    for name, cells in _in_order(found["given"]):
        beside = cells.get("minus_own", {})
        shown = (f"nll_{part}" for part in PARTS)
        rows.append(
            [_GIVEN[name], *(_difference(beside, key) if beside else f"{cells[key]['value']:.3f}" for key in shown)]
        )
    note = (
        "Nats per reply: values for the system's own exemplars, and for the others the differences from them. The "
        "three parts add up to the negative log-likelihood."
    )
    return Table(f"{title}: where in the reply", note, ["given", "first token", "between", "end"], rows)


def _replies(title: str, found: Mapping[str, Any]) -> Table:
    replies = found["replies"]
    names = {"bleu_2_precision": 2, "distinct_2": 2, "words": 2, "questions": 1}
    rows = [
        [_GIVEN[name], *(_value(cells[key], digits) for key, digits in names.items())]
        for name, cells in _in_order(replies["given"])
    ]
    head = ["given", metric_title("bleu_2_precision"), "Dist-2 at equal counts ↑", "words", "questions, %"]
    note = (
        f"Replies to {replies['rows']:,} of these rows by the same decoder, with 95% intervals over dialogues. Dist-2 "
        f"is of {replies['bigrams']:,} bigrams in every line."
    )
    return Table(f"{title}: replies", note, head, rows)


def _recall(found: Mapping[str, Any]) -> Table:
    recall = found["recall"]
    names = [f"gold_recall_at_{k}:{recall['among']}" for k in RECALL_AT]
    rows = [[_reader(name), *(_value(cells[key], 1) for key in names)] for name, cells in recall["by"].items()]
    note = (
        f"Share of contexts, in percent, whose gold reply ranks among the first {', '.join(map(str, RECALL_AT))} of "
        f"{recall['among']:,}: itself and training replies, with 95% intervals over dialogues. Every retriever reads "
        "replies alone here, without their contexts and emotions. The likelihoods show what helps a generator."
    )
    head = ["retriever", *(f"recall@{k} ↑" for k in RECALL_AT)]
    return Table(f"Gold replies among {recall['among']:,}", note, head, rows)


def _in_order(given: Mapping[str, Any]) -> list[tuple[str, Any]]:
    return [(name, given[name]) for name in _GIVEN if name in given]


def _reader(name: str) -> str:
    return _READERS.get(name, name)


def _difference(cells: Mapping[str, Any], name: str, digits: int = 3) -> str:
    if name not in cells:
        return "–"
    value, low, high = (f"{cells[name][key]:+.{digits}f}" for key in ("value", "low", "high"))
    return f"{value} ({low} to {high})"


def _value(cell: Mapping[str, float], digits: int) -> str:
    value, low, high = (f"{cell[key]:.{digits}f}" for key in ("value", "low", "high"))
    return f"{value} ({low}–{high})"


def chart(found: Mapping[str, Any]) -> str:
    """Returns a stage's effects of each kind of exemplars on the likelihood, against none, as SVG."""
    name = f"minus_{BESIDE[1]}"
    differences = {_GIVEN[given]: cells[name]["nll"] for given, cells in _in_order(found["given"]) if name in cells}
    rows = {given: (one["value"], one["low"], one["high"]) for given, one in differences.items()}
    return intervals(rows, label="NLL compared with no exemplars, nats per reply (left: likelier)")
