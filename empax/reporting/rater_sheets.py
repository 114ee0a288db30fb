r"""Pairs of replies for people to compare: which of two systems answers a context better, they do not know whose.

  python -m empax.reporting.rater_sheets OURS/predictions.jsonl OTHERS.jsonl --output=FOLDER --rows=100 --seed=0

FOLDER/pairs.csv has contexts, replies on two sides and an empty cell for each aspect, for "1", "2" or "tie".
FOLDER/key.json says which file each side is from; it stays with whoever counts. Contexts and sides are drawn by the
seed. Source: the pairwise ratings of ReflectDiffu, Table 3, as of MoEL and its descendants.
"""

from __future__ import annotations

import argparse
import csv
import io
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from empax.core.config import ConfigError
from empax.core.files import DataError, json_text, message_of, write_together
from empax.core.paths import expand
from empax.core.types import Prediction
from empax.evaluation.pairing import pair_rows
from empax.evaluation.rows import read_predictions

ASPECTS = ("empathy", "relevance", "fluency")


def sheets(
    first: Sequence[Prediction], second: Sequence[Prediction], *, rows: int, seed: int
) -> tuple[list[list[str]], list[dict[str, object]]]:
    """Lines of the sheet without its head, and of its key.

    Args:
      first: predictions of one system.
      second: of the other, for the same contexts, in any order.
      rows: how many contexts to draw.
      seed: of contexts and sides.

    Returns:
      For each pair its number, context and two replies; and its number, the row's id, and which system, 0 or 1, is on
      side 1.

    Raises:
      ConfigError: there are fewer contexts.
      DataError: the two do not answer the same contexts.
    """
    pairs = list(zip(*pair_rows(first, second), strict=True))
    if not 0 < rows <= len(pairs):
        raise ConfigError(f"rows = {rows}, but the two systems answer {len(pairs)} contexts; set it from 1 to as many.")
    rng = np.random.default_rng(seed)
    drawn, sides = rng.permutation(len(pairs))[:rows], rng.integers(2, size=rows)
    lines, keys = [], []
    for number, (row, side) in enumerate(zip(drawn.tolist(), sides.tolist(), strict=True), 1):
        pair = pairs[row] if side == 0 else pairs[row][::-1]
        context = "\n".join(f"{'SL'[(len(pair[0].context) - 1 - i) % 2]}: {t}" for i, t in enumerate(pair[0].context))
        lines.append([str(number), context, pair[0].response, pair[1].response])
        keys.append({"number": number, "id": pair[0].id, "side_1": side})
    return lines, keys


def write_sheets(files: Sequence[Path], folder: Path, *, rows: int, seed: int) -> None:
    """Reads two files of predictions and writes pairs.csv and key.json, both or none.

    Raises:
      ConfigError, DataError: see `sheets`; or a line of a file is damaged.
    """
    systems = []
    for file in files:
        found, bad = read_predictions(file)
        if bad:
            raise DataError(f"{file}, {bad[0]}; correct the line.")
        systems.append(found)
    lines, keys = sheets(systems[0], systems[1], rows=rows, seed=seed)
    table = io.StringIO()
    writer = csv.writer(table, lineterminator="\n")
    writer.writerow(["number", "context", "reply_1", "reply_2", *ASPECTS])
    writer.writerows([*line, *("" for _ in ASPECTS)] for line in lines)
    key = {"systems": [str(file) for file in files], "seed": seed, "pairs": keys}
    folder.mkdir(parents=True, exist_ok=True)
    write_together(folder, {"pairs.csv": table.getvalue(), "key.json": json_text(key)})


def main(argv: Sequence[str]) -> int:
    """Returns 0, or 2 where the files are not what they should be."""
    parser = argparse.ArgumentParser(prog="python -m empax.reporting.rater_sheets", description="Pairs for raters.")
    parser.add_argument("files", type=Path, nargs=2, help="predictions of two systems")
    parser.add_argument("--output", type=Path, required=True, help="folder for pairs.csv and key.json")
    parser.add_argument("--rows", type=int, default=100, help="how many contexts")
    parser.add_argument("--seed", type=int, default=0, help="of contexts and sides")
    given = parser.parse_args(argv)
    try:
        write_sheets([*map(expand, given.files)], expand(given.output), rows=given.rows, seed=given.seed)
    except (ConfigError, DataError, OSError) as error:
        print(f"error: {message_of(error)}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
