"""The report of a run: all results as one JSON object, a Markdown page and an HTML page.

`build_report` is a pure function of the stages' results; `run` collects these from the work directory.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from empax.core.config import ConfigError, check_numbers
from empax.core.files import DataError, json_text, read_json, read_jsonl, write_together
from empax.core.inputs import note
from empax.core.paths import expand
from empax.core.system import RunContext
from empax.core.text_files import visible
from empax.core.text_functions import TWO_ROWS
from empax.core.types import Instance, Prediction
from empax.data.store import prepared_instances
from empax.evaluation import controls, published
from empax.evaluation.pairing import describe_rows
from empax.evaluation.published import NOT_COMPARABLE, PAPER_OF, TABLES, TestSet
from empax.evaluation.rows import read_all
from empax.evaluation.scoring import JUDGES, VARIANTS, Scores, ScoringSettings, score, try_own
from empax.evaluation.verdict import verdict
from empax.pipeline.evaluate import main_stage
from empax.reporting import findings, markdown, other_corpora, page, swaps
from empax.reporting.controls import key
from empax.reporting.findings import confusions
from empax.reporting.peers import read_peer_sets, score_peers, why_apart

Report = dict[str, Any]

_MAX_POINTS = 200  # of a learning curve: enough for a chart of 460 pixels


@dataclasses.dataclass(frozen=True)
class Settings:
    """Settings of the `report` stage.

    Attributes:
      bootstrap_samples: resamples per interval.
      seed: seed of the resamples.
      variants: named variants of the metrics, see `evaluation.scoring.VARIANTS`.
      metrics: user metrics after the others: see `evaluation.scoring.ScoringSettings.own`.
      examples: number of predictions on the page, evenly spaced over the test set.
      paper_row: this system's row in a paper's main table, whose other rows are shown too; "" = no row.
      peers: folder of *.jsonl with released outputs of other systems, scored by the same code; "" = none.
    """

    bootstrap_samples: int = 1000
    seed: int = 0
    variants: tuple[str, ...] = VARIANTS
    metrics: tuple[str, ...] = ()
    examples: int = 12
    paper_row: str = ""
    peers: str = ""

    def __post_init__(self) -> None:
        if self.paper_row and self.paper_row not in PAPER_OF:
            raise ValueError(
                f"paper_row = {self.paper_row!r} is not a row of evaluation/published.json: {', '.join(PAPER_OF)}."
            )
        check_numbers(self, "examples", least=0)
        self.scoring()  # an invalid number or variant fails before any stage runs

    def scoring(self) -> ScoringSettings:
        return ScoringSettings(self.bootstrap_samples, self.seed, self.variants, self.metrics)


def check(settings: Settings, run: RunContext) -> None:
    """Checks that there will be predictions, that the other systems' outputs exist, and that user metrics work.

    Raises:
      ConfigError: no earlier stage answers the run's own data, or a metric fails on two rows.
      DataError: `peers` is not a folder, or is empty.
    """
    if main_stage(run.plan) not in run.before():
        raise ConfigError(
            f"config.run has no stage of kind 'evaluate' before {run.stage!r} that answers the run's own data; "
            "add one, or leave the report out."
        )
    try_own(settings.metrics, [Prediction(row.context, row.response, row.response) for row in TWO_ROWS])
    if settings.peers:
        folder = expand(settings.peers)
        if not (files := sorted(folder.glob("*.jsonl"))):
            raise DataError(
                f"config.{run.stage}.peers = {settings.peers!r} is not a folder with *.jsonl files; set it to one."
            )
        note("the outputs of other systems", folder, files)


def run(settings: Settings, run: RunContext) -> None:
    """Scores the predictions of the work directory and writes report.json, report.md and report.html.

    Raises:
      DataError: there are no predictions yet, or a file of the work directory is damaged.
    """
    files = run.files
    predictions = read_all(files.predictions, remedy="Run again with --redo of the stage that decodes.")
    config = dict(run.plan.config)
    stages, main = tuple(config["run"]), main_stage(run.plan)
    history = list(read_jsonl(files.metrics)) if files.metrics.exists() else []
    scores = score(predictions, settings=settings.scoring())
    recorded = Recorded(
        system=str(config["system"]),
        config=config,
        data=findings.count_instances(files, stages),
        speed=findings.find_speed(history, findings.find_seconds(files, stages))
        | findings.find_peak_memory(files, stages),
        run=read_json(files.provenance) if files.provenance.exists() else {},
        replies=findings.find_replies(files, stages),
        evaluations=other_corpora.score_evaluations(files, config, settings.scoring()),
        swaps=swaps.score_stages(files, config, samples=settings.bootstrap_samples, seed=settings.seed),
    )
    table = PAPER_OF.get(settings.paper_row, "")
    paper, ablations = TABLES.get(table, ({}, {}))
    report = build_report(
        recorded,
        predictions,
        scores,
        settings=settings,
        paper=paper,
        peers=score_peers(expand(settings.peers), cache=run.directory / "peers", settings=settings.scoring())
        if settings.peers
        else {},
        peer_sets=read_peer_sets(expand(settings.peers)) if settings.peers else {},
        history=history,
        notes={
            "indexes": findings.of_stages(files, stages, "index.json"),
            "classifiers": findings.find_classifiers(files, stages),
            "paper_table": table,
            "paper_ablations": ablations,
            "not_comparable": NOT_COMPARABLE.get(table, {}),
            "evaluate": findings.of_stages(files, [main], "evaluate.json").get(main, {}),
            "utility": findings.of_stages(files, stages, "utility.json"),
            "intents": next(iter(findings.of_stages(files, stages, "intents.json").values()), {}),
        },
        training=prepared_instances(run, "train") if files.instances("train").exists() else (),
        stage=main,
        retrieves=findings.retrieves(run.plan, main),
    )
    write_report(report, files.root)


@dataclasses.dataclass(frozen=True)
class Recorded:
    """The parts of a report that are in it as they were found: by `findings`, `other_corpora` and `swaps`.

    `config` is that of the run, empty if unknown; `run` is run.json.
    """

    system: str
    config: Mapping[str, Any]
    data: Mapping[str, Any]
    speed: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    run: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    replies: Sequence[Mapping[str, Any]] = ()
    evaluations: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict)
    swaps: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict)


def build_report(
    recorded: Recorded,
    predictions: Sequence[Prediction],
    scores: Scores,
    *,
    settings: Settings = Settings(),
    paper: Mapping[str, Mapping[str, float]],
    peers: Mapping[str, Mapping[str, Mapping[str, float]]],
    history: Sequence[Mapping[str, Any]],
    notes: Mapping[str, Any],
    peer_sets: Mapping[str, TestSet] | None = None,
    training: Sequence[Instance] = (),
    stage: str = "",
    retrieves: bool = False,
) -> Report:
    """Builds the report of a run as one JSON object.

    `paper` (row → metric → value) is shown only if it is on the same rows. A peer whose rows in `peer_sets` are from
    another corpus is left out. `notes` may hold anything by name; the page shows those that it knows, such as
    `comparisons`. `training` is the training data, for controls, and `stage` the evaluate stage of `predictions`. The
    verdict reads `retrieves`.
    """
    test_set = published.identify(predictions, data=recorded.data, config=recorded.config, stage=stage)
    if test_set.why_not:
        left_out = ("paper_ablations", "not_comparable")
        paper, notes = {}, {name: note for name, note in notes.items() if name not in left_out}
    left_out = {name: why for name, other in (peer_sets or {}).items() if (why := why_apart(test_set, other))}
    return {
        **vars(recorded),
        "verdict": verdict(predictions, retrieves=retrieves),
        "test_set": test_set.as_json(),
        "metrics": scores.metrics,
        "variants": scores.variants,
        "counts": scores.counts,
        "rows": describe_rows(predictions) if predictions else {},
        "controls": {**controls.score_controls(predictions, training, seed=settings.seed), "seed": settings.seed},
        "empathy": empathy_findings(predictions, notes, seed=settings.seed),
        "paper": dict(paper.get(settings.paper_row, {})),
        "paper_row": settings.paper_row,
        "published": {name: dict(values) for name, values in paper.items()},
        "published_absent": test_set.why_not,
        "peers": {name: dict(values) for name, values in peers.items() if name not in left_out},
        "peer_sets": {name: other.as_json() for name, other in (peer_sets or {}).items()},
        "peers_absent": left_out,
        "history": collect_curves(history),
        "examples": [_example(row) for row in _spread(predictions, settings.examples)],
        "corrected": [_example(row) for row in _spread(corrected(predictions), settings.examples)],
        "confusion": confusions(predictions),
        "notes": dict(notes),
    }


def empathy_findings(predictions: Sequence[Prediction], notes: Mapping[str, Any], *, seed: int = 0) -> dict[str, Any]:
    """Returns each mechanism judge's results with controls, the judges' agreement, and the linear judge's quality.

    Empty without judges.
    """
    judges = ("", *JUDGES)
    found = {key(judge): controls.empathy_agreement(predictions, judge, seed=seed) for judge in judges}
    found = {name: agreement for name, agreement in found.items() if agreement}
    pairs: dict[str, dict[str, Any]] = {}
    for one, other in itertools.combinations(judges, 2):
        if key(one) in found and key(other) in found:
            pairs.setdefault(key(one), {})[key(other)] = controls.judges_agreement(predictions, one, other)
    about = notes.get("evaluate", {}).get("linear_judge") or notes.get("linear_judge")
    return {**found, **({"agreement": pairs} if pairs else {}), **({"linear_judge": about} if about else {})}


def write_report(report: Report, folder: Path) -> None:
    """Writes report.json, report.md and report.html (self-contained) to `folder`, all three or none.

    Examples and replies quote the corpus, so only the pages have them: report.json may be shared whatever the corpus's
    licence.
    """
    kept = {name: part for name, part in report.items() if name not in ("examples", "corrected", "replies")}
    pages = {"report.md": visible(markdown.markdown(report)), "report.html": visible(page.html(report))}
    write_together(folder, {"report.json": json_text(kept), **pages})


def collect_curves(history: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, dict[str, list[list[float]]]]]:
    """Returns the numbers of metrics.jsonl as stage → name → split → [step, value] points, thinned for a chart."""
    curves: dict[str, dict[str, dict[str, list[list[float]]]]] = {}
    for row in history:
        for name, value in row.items():
            if name == "step" or isinstance(value, bool) or not isinstance(value, (int, float)):
                continue
            points = curves.setdefault(str(row["stage"]), {}).setdefault(name, {})
            points.setdefault(str(row.get("split", "train")), []).append([row["step"], value])
    return {
        stage: {
            name: {split: _spread(sorted(points), _MAX_POINTS) for split, points in splits.items()}
            for name, splits in names.items()
        }
        for stage, names in curves.items()
    }


def _spread(items: Sequence[Any], count: int) -> list[Any]:
    """Returns `count` items evenly spaced from the first to the last; all if there are fewer."""
    if len(items) <= count:
        return list(items)
    if count < 2:
        return list(items[:count])
    return [items[round(i * (len(items) - 1) / (count - 1))] for i in range(count)]


_THOUGHTS = ("intent_first", "intent_second", "intent_prediction")


def corrected(predictions: Sequence[Prediction]) -> list[Prediction]:
    """Returns the rows with a wrong emotion and first intent, but a right final intent.

    Source: the cases of ReflectDiffu, Tables 4 and 5.
    """
    found = []
    for row in predictions:
        gold, first, final = (row.notes.get(name, "") for name in ("intent", "intent_first", "intent_prediction"))
        misread = row.emotion and row.emotion_prediction not in ("", row.emotion)
        if misread and gold and first and gold == final != first:
            found.append(row)
    return found


def _example(row: Prediction) -> dict[str, Any]:
    return {
        "id": row.id,
        "intent": row.notes.get("intent") or "",
        "intents": [row.notes[name] for name in _THOUGHTS if row.notes.get(name)],
        "context": list(row.context),
        "emotion": row.emotion,
        "emotion_prediction": row.emotion_prediction,
        "attributes": dict(row.attributes),
        "response": row.response,
        "reference": row.reference,
        "exemplars": [dict(exemplar) for exemplar in row.exemplars],
    }
