"""Small SVG charts as text: lines, intervals, heat maps.

Colours are CSS variables of the enclosing page.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from html import escape

Points = Sequence[tuple[float, float]]

_WIDTH, _HEIGHT = 460, 240
_LEFT, _RIGHT, _TOP, _BOTTOM = 60, 24, 12, 40
_NAME = 15  # letters of a system's name before its interval; the full name shows on hover


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Returns about `count` round numbers from at or below `low` to at or above `high`."""
    if not high > low:
        margin = abs(low) * 0.1 or 1.0
        low, high = low - margin, low + margin
    raw = (high - low) / max(1, count - 1)
    unit = 10.0 ** math.floor(math.log10(raw))
    step = next(unit * factor for factor in (1, 2, 2.5, 5, 10) if unit * factor >= raw * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [step * i for i in range(first, last + 1)]


def number(value: float) -> str:
    """Formats a number in short form: 1200 → 1.2k, 0.00012 → 1.2e-4."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    size = abs(value)
    if size >= 1e6:
        return f"{value / 1e6:.3g}M"
    if size >= 1e4:
        return f"{value / 1e3:.3g}k"
    if size < 1e-3:
        mantissa, exponent = f"{value:.1e}".split("e")
        return f"{mantissa}e{int(exponent)}"
    return f"{value:.4g}"


def line_chart(series: Mapping[str, Points], *, x_label: str, y_label: str) -> str:
    """Draws lines over a common x axis, one colour class each, with a legend; omits points that are not finite."""
    shown = {
        name: [(x, y) for x, y in points if math.isfinite(x) and math.isfinite(y)] for name, points in series.items()
    }
    shown = {name: points for name, points in shown.items() if points}
    if not shown:
        return '<p class="empty">No points.</p>'
    xs = [x for points in shown.values() for x, _ in points]
    ys = [y for points in shown.values() for _, y in points]
    x_ticks, y_ticks = ticks(min(xs), max(xs)), ticks(min(ys), max(ys))
    x_low, x_high = (min(xs), max(xs)) if max(xs) > min(xs) else (x_ticks[0], x_ticks[-1])
    y_low, y_high = y_ticks[0], y_ticks[-1]

    def place(x: float, y: float) -> tuple[float, float]:
        across = (x - x_low) / (x_high - x_low) * (_WIDTH - _LEFT - _RIGHT)
        up = (y - y_low) / (y_high - y_low) * (_HEIGHT - _TOP - _BOTTOM)
        return _LEFT + across, _HEIGHT - _BOTTOM - up

    parts = []
    for y in y_ticks:
        height = place(x_low, y)[1]
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{height:.1f}" y2="{height:.1f}"/>')
        parts.append(_text(number(y), _LEFT - 6, f"{height + 4:.1f}", anchor="end"))
    for x in (tick for tick in x_ticks if x_low <= tick <= x_high):
        parts.append(_text(number(x), f"{place(x, y_low)[0]:.1f}", _HEIGHT - _BOTTOM + 16))
    for i, points in enumerate(shown.values()):
        places = [place(x, y) for x, y in sorted(points)]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        parts.append(f'<polyline class="line s{i % 4}" points="{path}"/>')
        if len(places) <= 12:  # few enough to distinguish, or a single point, which makes no line
            parts.extend(f'<circle class="dot s{i % 4}" cx="{x:.1f}" cy="{y:.1f}" r="3"/>' for x, y in places)
    parts.append(_text(x_label, (_WIDTH + _LEFT) / 2, _HEIGHT - 6, kind="axis"))
    parts.append(_upright(y_label, (_HEIGHT - _BOTTOM + _TOP) / 2))
    return _svg(_WIDTH, _HEIGHT, parts, f"{y_label} over {x_label}") + _legend(list(shown))


def intervals(rows: Mapping[str, tuple[float, float, float]], *, label: str) -> str:
    """Draws for each name a dot at its value and a line from low to high, on a common axis."""
    left, width, row = 168, 250, 26
    bottom = len(rows) * row + 4
    marks = ticks(min(low for _, low, _ in rows.values()), max(high for _, _, high in rows.values()))
    place, svg = _across(marks, left, width, bottom, below=16, zero="zero")
    for i, (name, (value, low, high)) in enumerate(rows.items()):
        height = i * row + row / 2 + 2
        title = f"<title>{escape(name)}: {value:.3g} ({low:.3g} to {high:.3g})</title>"
        svg.append(_text(name, left - 8, f"{height + 4:g}", anchor="end"))
        svg.append(
            f'<line class="line s0" x1="{place(low):.1f}" x2="{place(high):.1f}" y1="{height:g}" y2="{height:g}"/>'
        )
        svg.append(f'<circle class="dot s0" cx="{place(value):.1f}" cy="{height:g}" r="4">{title}</circle>')
    svg.append(_text(label, f"{(left + width + 24) / 2:g}", bottom + 34, kind="axis"))
    return _svg(left + width + 24, bottom + 42, svg, label)


def beside(
    ours: tuple[float, float, float],
    others: Mapping[str, tuple[float, float | None, float | None]],
    *,
    label: str,
) -> str:
    """Draws a value with its interval, and below it the values compared with it, with intervals if they have any.

    A band through all of them has the width of the first interval.
    """
    left, width, row = 104, 196, 19
    rows = {"this run": ours, **others}
    ends = [end for ends in rows.values() for end in ends if end is not None]
    bottom = len(rows) * row + 4
    marks = ticks(min(ends), max(ends), count=4)
    place, axis = _across(marks, left, width, bottom, below=14)
    low, high = place(ours[1]), place(ours[2])
    svg = [f'<rect class="band" x="{low:.1f}" y="0" width="{high - low:.1f}" height="{bottom}"/>', *axis]
    for i, (name, (value, low, high)) in enumerate(rows.items()):
        height, kind = i * row + row / 2 + 2, "rest" if i else "s0"
        ends = f"{value:.4g}" if low is None or high is None else f"{value:.4g} ({low:.4g} to {high:.4g})"
        title = f"<title>{escape(name)}: {ends}</title>"
        shown = name if len(name) <= _NAME else f"{name[: _NAME - 1]}…"
        shade = "tick" if i else "axis own"
        svg.append(_text(shown, left - 8, f"{height + 4:g}", kind=shade, anchor="end", title=title))
        if low is not None and high is not None:
            ends = f'x1="{place(low):.1f}" x2="{place(high):.1f}"'
            svg.append(f'<line class="line {kind}" {ends} y1="{height:g}" y2="{height:g}"/>')
        svg.append(f'<circle class="dot {kind}" cx="{place(value):.1f}" cy="{height:g}" r="3.5">{title}</circle>')
    return _svg(left + width + 20, bottom + 20, svg, f"{label}, this run compared with {', '.join(others)}")


def heat_map(
    labels: Sequence[str],
    matrix: Sequence[Sequence[float]],
    *,
    row_title: str,
    column_title: str,
    columns: Sequence[str] = (),
    cell: int = 14,
) -> str:
    """Draws a confusion matrix, cells shaded by their share of the row's sum; counts show on hover, and if they fit.

    `columns` are the column labels, by default those of the rows.
    """
    columns = columns or labels
    margin = 24 + 7 * max(map(len, [*labels, *columns]))
    svg = []
    for j, label in enumerate(columns):
        centre = margin + j * cell + cell / 2
        svg.append(
            f'<text class="tick" x="{centre + 4}" y="{margin - 5}" transform="rotate(-90 {centre + 4} {margin - 5})">'
            f"{escape(label)}</text>"
        )
    for i, label in enumerate(labels):
        centre = margin + i * cell + cell / 2
        svg.append(_text(label, margin - 5, centre + 4, anchor="end"))
        total = sum(matrix[i])
        for j, count in enumerate(matrix[i]):
            share = count / total if total else 0.0
            x, y = margin + j * cell, margin + i * cell
            title = f"<title>{escape(label)} → {escape(columns[j])}: {count:g} ({100 * share:.1f}%)</title>"
            svg.append(f'<rect class="cell" x="{x}" y="{y}" width="{cell - 1}" height="{cell - 1}"/>')
            if count:
                svg.append(
                    f'<rect class="heat" x="{x}" y="{y}" width="{cell - 1}" height="{cell - 1}" '
                    f'fill-opacity="{max(0.06, share):.3f}">{title}</rect>'
                )
            if cell >= 40:
                shade = "strong" if share > 0.55 else "weak"
                kind = f"value {shade}"
                svg.append(_text(f"{100 * share:.0f}%", x + cell / 2, y + cell / 2 + 4, kind=kind))
    height, width = len(labels) * cell, len(columns) * cell
    svg.append(_upright(row_title, margin + height / 2))
    svg.append(_text(column_title, margin + width / 2, 12, kind="axis"))
    return _svg(margin + width + 4, margin + height + 4, svg, f"{row_title} against {column_title}")


def _across(
    marks: Sequence[float], left: float, width: float, bottom: float, *, below: int, zero: str = "grid"
) -> tuple[Callable[[float], float], list[str]]:
    """Returns a map from numbers to positions on a horizontal axis, and the axis with grid lines and labels."""

    def place(x: float) -> float:
        return left + (x - marks[0]) / (marks[-1] - marks[0]) * width

    svg = []
    for mark in marks:
        kind, x = zero if abs(mark) < 1e-9 else "grid", f"{place(mark):.1f}"
        svg.append(f'<line class="{kind}" x1="{x}" x2="{x}" y1="0" y2="{bottom}"/>')
        svg.append(_text(number(round(mark, 9)), x, bottom + below))
    return place, svg


def _text(
    words: str, x: float | str, y: float | str, *, kind: str = "tick", anchor: str = "middle", title: str = ""
) -> str:
    return f'<text class="{kind}" x="{x}" y="{y}" text-anchor="{anchor}">{escape(words)}{title}</text>'


def _upright(title: str, middle: float) -> str:
    turned = f'transform="rotate(-90 12 {middle})"'
    return f'<text class="axis" x="12" y="{middle}" text-anchor="middle" {turned}>{escape(title)}</text>'


def _svg(width: float, height: float, parts: Sequence[str], label: str) -> str:
    return (
        f'<svg viewBox="0 0 {width:g} {height:g}" width="{width:g}" role="img" aria-label="{escape(label)}">'
        + "".join(parts)
        + "</svg>"
    )


def _legend(names: Sequence[str]) -> str:
    keys = (f'<span><i class="key s{i % 4}"></i>{escape(name)}</span>' for i, name in enumerate(names))
    return f'<div class="legend">{"".join(keys)}</div>'
