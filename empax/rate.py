r"""Human evaluation: makes a blinded study of several systems' replies, and scores the raters' answers.

  empax rate make OURS=A.jsonl THEIRS=B.jsonl --output=STUDY            # two replies side by side
  empax rate make OURS=A.jsonl THEIRS=B.jsonl --reference --form=likert --output=STUDY
  empax rate score STUDY/key.json answers-*.json                        # or filled copies of STUDY/sheet.csv
  empax rate pairs STUDY/key.json answers-*.json --systems OURS=A.jsonl THEIRS=B.jsonl --output=pairs.jsonl
  empax rate power --win-rate=0.6                                       # how many ratings a difference needs

With --data=FOLDER, the folder of EmpatheticDialogues, a line may give `id` alone, as in results/.
STUDY/rate.html is one page for raters: it needs no network, keeps answers, and saves them to a file. STUDY/key.json
names the system behind each reply; keep it from the raters. Scoring needs `pip install 'empax[rate]'`.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path

from empax.core.command import in_one_line, interruptible
from empax.core.config import ConfigError
from empax.core.files import DataError, write_json, write_jsonl
from empax.core.paths import expand, given_folder
from empax.core.text_files import visible
from empax.core.types import Prediction
from empax.data.empathetic_dialogues import load_corpus
from empax.evaluation.rows import read_all
from empax.rating.answers import preferred, read_answers, read_key
from empax.rating.page import write_study
from empax.rating.scores import needed_ratings, score, text
from empax.rating.study import ASPECTS, REFERENCE, StudySettings, make_study

_OF_STUDY = {
    "form": "pairs (two replies side by side) or likert (one reply, 1 to 5)",
    "rows": "number of contexts",
    "comparisons": "pairs of systems for each context",
    "repeats": "share of items that are shown again with sides swapped",
    "checks": "share of items with a known answer",
    "seed": "seed of contexts, pairs, sides and order",
}


@in_one_line
def main(argv: Sequence[str]) -> int:
    """Returns 0, or 2 for an invalid file or flag."""
    given = _parser().parse_args(argv)
    return given.run(given)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="empax rate", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True, metavar="make|score|pairs|power")
    make = commands.add_parser("make", help="write a study")
    make.add_argument("systems", nargs="+", metavar="NAME=FILE", help="predictions of each system")
    make.add_argument("--data", default="", help="folder with EmpatheticDialogues, for lines with only an id")
    make.add_argument("--output", type=Path, required=True, help="folder for rate.html, sheet.csv and key.json")
    make.add_argument("--reference", action="store_true", help="add people's own replies as a system")
    for field in dataclasses.fields(StudySettings):
        kind = {"form": str, "repeats": float, "checks": float}.get(field.name, int)
        about = f"{_OF_STUDY[field.name]}; default {field.default}"
        make.add_argument(f"--{field.name}", type=kind, default=field.default, help=about)
    make.set_defaults(run=_make)
    count = commands.add_parser("score", help="count the answers")
    count.add_argument("key", type=Path, help="key.json of the study")
    count.add_argument("answers", type=Path, nargs="+", help="files that raters have saved, one of each rater")
    count.add_argument("--output", type=Path, help="JSON file for the scores")
    count.add_argument("--samples", type=int, default=1000, help="resamples behind each interval")
    count.add_argument("--seed", type=int, default=0, help="seed of the resamples")
    count.set_defaults(run=_score)
    pairs = commands.add_parser("pairs", help="write preferred and rejected replies for training")
    pairs.add_argument("key", type=Path, help="key.json of the study")
    pairs.add_argument("answers", type=Path, nargs="+", help="files that raters have saved, one of each rater")
    pairs.add_argument("--systems", nargs="+", required=True, metavar="NAME=FILE", help="predictions of each system")
    pairs.add_argument("--data", default="", help="as for make")
    pairs.add_argument("--output", type=Path, required=True, help="JSON-lines file for the pairs")
    pairs.add_argument(
        "--aspect", choices=ASPECTS, default=ASPECTS[0], help="aspect that decides which reply is preferred"
    )
    pairs.set_defaults(run=_pairs)
    power = commands.add_parser("power", help="how many ratings a difference needs")
    power.add_argument("--win-rate", type=float, required=True, help="win rate of the better system, without ties")
    power.add_argument("--power", type=float, default=0.8, help="probability that the test detects the difference")
    power.add_argument("--level", type=float, default=0.05, help="significance level of the test")
    power.add_argument(
        "--design-effect", type=float, default=1.0, help="1 + (m - 1) r, for m ratings of a context with correlation r"
    )
    power.set_defaults(run=_power)
    return parser


def _make(given: argparse.Namespace) -> int:
    output = given_folder(given.output, "--output")
    settings = StudySettings(**{f.name: getattr(given, f.name) for f in dataclasses.fields(StudySettings)})
    systems = _systems(given.systems, given.data)
    if REFERENCE in systems:
        raise ConfigError(
            f"{REFERENCE!r} is the name of people's own replies, which --reference adds; rename the system."
        )
    if given.reference:
        _with_reference(systems, given.systems[0])
    study = make_study(systems, settings)
    write_study(study, output)
    print(f"{len(study.items)} items of {len(systems)} systems in {given.output}: rate.html and sheet.csv for raters, "
          "key.json for counting the answers.")  # fmt: skip
    return 0


def _systems(words: Sequence[str], data: str) -> dict[str, Sequence[Prediction]]:
    """Reads the predictions of NAME=FILE, by name; the corpus in `data` fills in fields that a line omits."""
    corpus = load_corpus(data).instances if data else None
    systems: dict[str, Sequence[Prediction]] = {}
    for word in words:
        name, equals, file = word.partition("=")
        if not equals or not name or name in systems:
            raise ConfigError(f"{word!r} must be NAME=FILE with a unique name, such as ours=predictions.jsonl.")
        systems[name] = read_all(expand(file), corpus)
    return systems


def _with_reference(systems: dict[str, Sequence[Prediction]], name: str) -> None:
    first = next(iter(systems.values()))
    if any(not row.reference for row in first):
        raise DataError(f"{name} has rows without a reference; to make a study, leave out --reference.")
    systems[REFERENCE] = [dataclasses.replace(row, response=row.reference) for row in first]


def _pairs(given: argparse.Namespace) -> int:
    key = read_key(expand(given.key))
    systems = _systems(given.systems, given.data)
    if REFERENCE in key.systems and REFERENCE not in systems:
        _with_reference(systems, given.systems[0])
    pairs = preferred(key, read_answers([expand(path) for path in given.answers], key), systems, given.aspect)
    if not pairs:
        raise ConfigError(f"most raters prefer no reply for {given.aspect}, so {given.output} is not written.")
    write_jsonl(expand(given.output), pairs)
    print(f"{len(pairs)} pairs in {given.output}.")
    return 0


def _score(given: argparse.Namespace) -> int:
    if given.samples < 1:
        raise ConfigError(f"--samples = {given.samples} must be at least 1.")
    if given.seed < 0:
        raise ConfigError(f"--seed = {given.seed} must be at least 0.")
    key = read_key(expand(given.key))
    answers = read_answers([expand(path) for path in given.answers], key)
    try:
        found = score(key, answers, samples=given.samples, seed=given.seed)
    except ModuleNotFoundError as error:
        raise ConfigError(f"{error.name} is not installed; pip install 'empax[rate]' brings it.") from error
    print(visible(text(found)))
    if given.output:
        write_json(expand(given.output), found)
        print(f"\nwrote {given.output}")
    return 0


def _power(given: argparse.Namespace) -> int:
    needed = needed_ratings(given.win_rate, power=given.power, level=given.level, design_effect=given.design_effect)
    print(f"{needed} ratings without a tie detect a win rate of {given.win_rate:g} with probability {given.power:g}.")
    return 0


def command_line() -> None:
    with interruptible():
        sys.exit(main(sys.argv[1:]))


if __name__ == "__main__":
    command_line()
