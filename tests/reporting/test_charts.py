"""Charts: that axes hold what is drawn on them, and that each looks as charts.html, beside this file, shows."""

import math
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from empax.reporting import charts
from tools.document import as_file

CURVES = {
    "train": [(3, 1.0), (1, 2.0), (2, math.nan), (math.inf, 1.5)],
    "validation": [(step, 1.5 - step / 20) for step in range(1, 14)],
    "none": [],
    "twelve": [(step, 2.0) for step in range(1, 13)],
}
DRAWN = [
    charts.line_chart(CURVES, x_label="step", y_label="a < b"),
    charts.line_chart({str(i): [(1, i)] for i in range(5)}, x_label="step", y_label="loss"),
    charts.line_chart({"train": [(1, math.nan)]}, x_label="x", y_label="y"),
    charts.intervals({"a < b": (0.5, -0.25, 0.9), "c": (-1.0, -1.0, -1.0)}, label="nats & bits"),
    charts.beside(
        (8.25, 8.0, 8.5),
        {"a name of 15 ab": (7.5, None, None), "a name of 16 abc": (9, 8.75, 9.125), "<": (8, 7.5, None)},
        label="BLEU-2 & more",
    ),
    charts.heat_map(
        ["sad", "<proud>"], [[55, 45], [0, 0]], row_title="gold & true", column_title="guess & found", cell=52
    ),
    charts.heat_map(["a"], [[1, 18.5, 0.5]], row_title="r", column_title="c", columns=["<x>", "y", "longest"], cell=40),
    charts.heat_map(["a", "b"], [[2, 2], [0, 1]], row_title="r", column_title="c", cell=39),
    charts.heat_map(["a"], [[1]], row_title="r", column_title="c"),
]


def test_each_chart_looks_as_kept():
    kept = Path(__file__).with_name("charts.html").read_text(encoding="utf-8").splitlines()[1:]  # the first is a style
    for chart, before in zip(DRAWN, kept, strict=True):
        assert chart == before


@pytest.mark.parametrize(
    ("value", "written"),
    [(0, "0"), (math.inf, "inf"), (-0.5, "-0.5"), (0.001, "0.001"), (0.00099, "9.9e-4"), (-0.00012, "-1.2e-4"),
     (9999.4, "9999"), (10_000, "10k"), (-12_345, "-12.3k"), (999_900, "1e+03k"), (1e6, "1M"), (2.35e7, "23.5M")],
)  # fmt: skip
def test_a_number_is_short(value, written):
    assert charts.number(value) == written


@pytest.mark.parametrize(
    ("low", "high", "count", "expected"),
    [
        (0, 1, 5, [0, 0.25, 0.5, 0.75, 1]),
        (3.2, 3.21, 5, [3.2, 3.2025, 3.205, 3.2075, 3.21]),
        (-5, 1200, 5, [-500, 0, 500, 1000, 1500]),
        (0.3, 4.1, 4, [0, 2, 4, 6]),
        (0, 10, 1, [0, 10]),
        (7, 7, 5, [6, 6.5, 7, 7.5, 8]),
        (-7, -7, 5, [-8, -7.5, -7, -6.5, -6]),
        (0, 0, 5, [-1, -0.5, 0, 0.5, 1]),
        (1e-5, 3e-4, 5, [0, 1e-4, 2e-4, 3e-4]),
    ],
)
def test_ticks_are_round_and_cover_the_range(low, high, count, expected):
    assert charts.ticks(low, high, count) == pytest.approx(expected, abs=1e-15)


def test_intervals_lie_where_their_axis_says():
    svg = charts.intervals({"a < b": (0.5, 0.0, 1.0), "c": (-1.0, -1.0, -1.0)}, label="nats")
    places = {text: float(x) for x, text in re.findall(r'class="tick" x="([\d.]+)"[^>]*>([-\d.]+)<', svg)}
    (one, other) = (float(x) for x in re.findall(r'<circle class="dot s0" cx="([\d.]+)"', svg))
    assert one == pytest.approx((places["0"] + places["1"]) / 2, abs=0.1)
    assert other == places["-1"]
    ends = re.findall(r'class="line s0" x1="([\d.]+)" x2="([\d.]+)"', svg)[0]
    assert tuple(map(float, ends)) == (places["0"], places["1"])
    assert "a &lt; b: 0.5 (0 to 1)" in svg
    assert svg.count('class="zero"') == 1
    ElementTree.fromstring(as_file(svg))  # a file that stands alone
