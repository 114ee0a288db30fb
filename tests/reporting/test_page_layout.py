"""The page of a report in a browser, at three widths and printed: nothing overlaps, nothing is cut, all can be read."""

import pytest

from empax.core.files import WorkDir, read_json
from empax.evaluation.rows import read_predictions
from empax.reporting import findings, page
from empax.reporting import report as reports

PRINTED = 688  # pixels of a page of A4 without its margins

# Boxes are compared in CSS pixels; what stands in a box that scrolls may be as wide as it likes.
PROBLEMS = """
() => {
  const found = [], wide = document.documentElement.clientWidth;
  const scrolls = (one) => one.closest('.wide, figure, pre') !== null;
  const shown = (one) => one.checkVisibility() && one.getClientRects().length > 0;
  const said = (one) => one.textContent.trim().slice(0, 40);
  const name = (one) => `${one.tagName.toLowerCase()}.${one.getAttribute('class') || ''} "${said(one)}"`;
  const all = document.documentElement.scrollWidth;
  if (all > wide + 1) found.push(`the page is ${all} wide`);
  for (const one of document.querySelectorAll('body *:not(svg *)')) {
    if (!shown(one)) continue;
    const box = one.getBoundingClientRect();
    if (!scrolls(one) && box.right > wide + 1) found.push(`beyond the edge: ${name(one)}`);
    const style = getComputedStyle(one);
    const leaves = one.clientWidth && one.scrollWidth > one.clientWidth + 1 && style.overflowX === 'visible';
    if (leaves && style.display !== 'inline' && !one.querySelector('.wide, figure, pre, svg'))
      found.push(`text leaves its box: ${name(one)}`);
  }
  const apart = (one, two) => one.right <= two.left + 1 || two.right <= one.left + 1
    || one.bottom <= two.top + 1 || two.bottom <= one.top + 1;
  const pairs = (all, what) => {
    const boxes = all.filter(shown).map((one) => [one, one.getBoundingClientRect()]);
    boxes.forEach(([one, box], i) => boxes.slice(i + 1).forEach(([two, other]) => {
      if (!apart(box, other)) found.push(`${what}: ${name(one)} and ${name(two)}`);
    }));
  };
  const parents = 'header, main, .cards, .leading, article, .replies, figcaption, .chips, nav, .columns, tr';
  for (const parent of document.querySelectorAll(parents)) pairs([...parent.children], 'overlap');
  for (const svg of document.querySelectorAll('svg')) {
    if (!shown(svg)) continue;
    const texts = [...svg.querySelectorAll('text')], frame = svg.getBoundingClientRect();
    pairs(texts, 'words of a chart overlap');
    for (const text of texts) {
      const box = text.getBoundingClientRect();
      const across = box.left >= frame.left - 1 && box.right <= frame.right + 1;
      const upright = box.top >= frame.top - 1 && box.bottom <= frame.bottom + 1;
      if (!across || !upright) found.push(`cut in a chart: ${name(text)}`);
      const scale = frame.width / svg.viewBox.baseVal.width;
      if (parseFloat(getComputedStyle(text).fontSize) * scale < SMALLEST) found.push(`too small: ${name(text)}`);
    }
  }
  return [...new Set(found)];
}
"""


@pytest.fixture(scope="module")
def address(finished, tmp_path_factory):
    """The page of a whole run of the tiny recipe, beside five systems whose names are of all lengths."""
    predictions, _ = read_predictions(finished / "predictions.jsonl")
    report = read_json(finished / "report.json")
    for name, kept in {"examples": 12, "corrected": 2}.items():
        report[name] = [reports._example(row) for row in predictions[:kept]]
    report["examples"][1]["response"] = "Supercalifragilisticexpialidocious " * 3 + "https://example.org/" + "a" * 90
    report["replies"] = findings.find_replies(WorkDir(finished), report["config"]["run"])
    both = {name: one for name, one in {**report["metrics"], **report["variants"]}.items() if one["value"] is not None}
    names = ("MoEL", "MIME", "EmpDG", "A system with a rather long name", "KEMP")
    report["peers"] = {
        name: {metric: {key: value * (0.7 + 0.15 * i) for key, value in one.items()} for metric, one in both.items()}
        for i, name in enumerate(names)
    }
    report["peer_sets"] = {name: {"rows": 5255} for name in names}
    path = tmp_path_factory.mktemp("page") / "report.html"
    path.write_text(page.html(report), encoding="utf-8")
    return path.as_uri()


def problems(shown, smallest=7.5):
    return shown.evaluate(PROBLEMS.replace("SMALLEST", str(smallest)))


@pytest.mark.slow
@pytest.mark.parametrize("unfolded", [False, True], ids=["as it opens", "all unfolded"])
@pytest.mark.parametrize("width", [390, 820, 1600])
def test_nothing_overlaps_and_nothing_is_cut(width, unfolded, browser, address, tmp_path):
    shown = browser.new_page(viewport={"width": width, "height": 900})
    shown.goto(address)
    if unfolded:
        shown.evaluate("document.querySelectorAll('details').forEach((one) => { one.open = true; })")
    shown.screenshot(path=tmp_path / f"{width}.png", full_page=True)  # to look at when this fails
    assert problems(shown) == []


@pytest.mark.slow
def test_verdict_metrics_and_replies_with_their_exemplars_stand_first(browser, address):
    shown = browser.new_page(viewport={"width": 1600, "height": 900})
    shown.goto(address)
    places = [shown.locator(one).first.bounding_box() for one in (".verdict", ".card svg", "article", "article ol li")]
    assert all(places)
    assert [place["y"] for place in places] == sorted(place["y"] for place in places)
    assert places[1]["y"] < 400
    assert shown.locator("#emotion svg").first.is_visible()


@pytest.mark.slow
def test_in_print_everything_is_unfolded_and_fits_the_paper(browser, address):
    shown = browser.new_page(viewport={"width": PRINTED, "height": 1000})
    shown.goto(address)
    shown.emulate_media(media="print")
    folded = "details:not(.far):not([open]) section"
    assert (
        shown.evaluate(f"[...document.querySelectorAll('{folded}')].filter((one) => !one.checkVisibility()).length")
        == 0
    )
    ends = "(one) => [one.getBoundingClientRect().left + one.scrollWidth, one.textContent.slice(0, 60)]"
    boxes = shown.evaluate(f"[...document.querySelectorAll('.wide, figure, table')].map({ends})")
    assert boxes
    assert [text for end, text in boxes if end > PRINTED + 1] == []
    assert len(shown.pdf(format="A4")) > 10_000


@pytest.mark.slow
def test_the_check_sees_what_overlaps_and_what_is_cut(browser):
    shown = browser.new_page(viewport={"width": 390, "height": 400})
    shown.set_content(
        "<main><p style='width: 40px'>unbreakableunbreakable</p><p style='margin-top: -30px'>over it</p></main>"
        "<svg width=50 viewBox='0 0 100 20'><text x=60 y=15 font-size=11>cut at the edge</text></svg>"
    )
    assert {one.partition(":")[0] for one in problems(shown)} == {
        "text leaves its box", "overlap", "cut in a chart", "too small",
    }  # fmt: skip
