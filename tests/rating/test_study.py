"""What raters see and what the key says: the same items, sides drawn, nothing given away."""

import collections
import csv
import dataclasses
import json
import re

import pytest

from empax.core.config import ConfigError
from empax.core.types import Prediction
from empax.rating.answers import Answer, Key, preferred
from empax.rating.page import page, sheet
from empax.rating.study import ASPECTS, StudySettings, make_study


def system(name, num=60):
    return [Prediction((f"one {i}", "oh", f"two {i}"), f"{name} {i}", f"gold {i}", id=f"d{i}#4") for i in range(num)]


THREE = {name: system(name) for name in ("ours", "theirs", "old")}


def test_items_show_the_replies_that_the_key_says_and_nothing_else():
    study = make_study(THREE | {"theirs": system("theirs")[::-1]}, StudySettings(rows=40, seed=3))
    shown, key = study.shown(), study.key()
    assert set(shown["items"][0]) == {"number", "context", "replies"}
    assert "repeat" not in json.dumps(shown)
    assert shown["study"] == key["study"]
    names = {"reference": "gold", "another context's reply": "gold", "ours": "ours", "theirs": "theirs", "old": "old"}
    for item, known in zip(shown["items"], key["items"], strict=True):
        number = known["id"][1:].split("#")[0]
        assert item["number"] == known["number"]
        assert item["context"] == [f"one {number}", "oh", f"two {number}"]
        for reply, whose in zip(item["replies"], known["systems"], strict=True):
            name, of = reply.rsplit(" ", 1)
            assert name.lower() == names[whose]
            assert (of == number) == (whose != "another context's reply")


def test_neither_the_blanks_nor_the_lower_case_of_a_tokeniser_give_a_system_away():
    rows = system("ours", 4)
    of_words = [dataclasses.replace(row, response=f"{row.response} , i 'm sorry .") for row in rows]
    study = make_study({"ours": rows, "words": of_words}, StudySettings(rows=4, repeats=0, checks=0))
    for item, shown in zip(study.items, study.shown()["items"], strict=True):
        told = dict(zip(item.systems, shown["replies"], strict=True))
        assert told["ours"].startswith("Ours ")
        assert told["words"] == f"{told['ours']}, I'm sorry."


def test_pairs_come_equally_often_and_sides_are_drawn():
    study = make_study(THREE, StudySettings(rows=60, comparisons=2, repeats=0, checks=0))
    pairs = collections.Counter(frozenset(item.systems) for item in study.items)
    assert sorted(pairs.values()) == [40, 40, 40]
    first = collections.Counter(item.systems[0] for item in study.items)
    assert min(first.values()) > 25  # of 40 on average
    assert len({item.id for item in study.items}) == 60


def test_repeats_are_earlier_items_with_sides_swapped_and_checks_have_a_known_side():
    study = make_study(THREE, StudySettings(rows=60, repeats=0.2, checks=0.1))
    items = {item.number: item for item in study.items}
    kinds = collections.Counter(item.kind for item in study.items)
    assert kinds == {"rated": 60, "check": 6, "repeat": 13}
    for item in study.items:
        if item.kind == "repeat":
            assert item.of < item.number
            assert items[item.of].kind == "rated"
            assert items[item.of].replies == item.replies[::-1]
            assert items[item.of].systems == item.systems[::-1]
        if item.kind == "check":
            assert item.systems[item.of - 1] == "reference"
    assert {item.of for item in study.items if item.kind == "check"} == {1, 2}


def test_a_scale_shows_every_reply_alone():
    study = make_study(THREE, StudySettings(form="likert", rows=10, repeats=0, checks=0.1))
    assert collections.Counter(i.systems for i in study.items if i.kind == "rated") == {(n,): 10 for n in THREE}
    assert all(len(item.replies) == 1 for item in study.items)
    assert sum(item.kind == "check" for item in study.items) == 3


def test_contexts_without_ids_are_told_apart():
    nameless = {name: [dataclasses.replace(row, id="") for row in rows] for name, rows in THREE.items()}
    study = make_study(nameless, StudySettings(rows=20))
    rated = [item for item in study.items if item.kind == "rated"]
    assert len({item.id for item in rated}) == 20
    key = Key("s", "pairs", tuple(nameless), {item.number: item for item in study.items})
    answers = [Answer("r", item, dict.fromkeys(ASPECTS, 1)) for item in rated]
    shown = {item.context: item.replies for item in rated}
    for found in preferred(key, answers, nameless, "empathy"):
        assert (found["chosen"], found["rejected"]) == shown[tuple(found["context"])]


def test_a_reply_to_nothing_may_be_checked():
    systems = {name: [Prediction(turns, name, f"gold {turns}") for turns in ((), ("hi",))] for name in ("a", "b")}
    study = make_study(systems, StudySettings(rows=2, checks=1.0, repeats=0))
    assert collections.Counter(item.kind for item in study.items) == {"rated": 2, "check": 2}


NAMELESS = [dataclasses.replace(row, id="") for row in system("theirs")]
TWICE = {
    name: [Prediction(("hi",), f"{name} {i}", "hello") for i in range(2)] + rows
    for name, rows in (("ours", system("ours")), ("theirs", NAMELESS))
}


@pytest.mark.parametrize("order", [("ours", "theirs"), ("theirs", "ours")])
@pytest.mark.parametrize("systems", [{"ours": system("ours"), "theirs": NAMELESS}, TWICE])
def test_what_is_preferred_is_found_where_ids_are_missing_or_a_context_comes_twice(systems, order):
    study = make_study(systems, StudySettings(rows=len(systems["ours"]), checks=0, repeats=0))
    assert len({item.id for item in study.items}) == len(study.items)
    key = Key("s", "pairs", tuple(systems), {item.number: item for item in study.items})
    answers = [Answer("r", item, dict.fromkeys(ASPECTS, 1)) for item in study.items]
    found = preferred(key, answers, {name: systems[name] for name in order}, "empathy")
    assert [(list(item.context), *item.replies) for item in study.items] == [
        (pair["context"], pair["chosen"], pair["rejected"]) for pair in found
    ]


def test_a_check_has_another_reply_on_each_side_where_people_repeat_themselves():
    stock = {
        name: [
            dataclasses.replace(row, reference="I am sorry." if i % 3 else f"gold {i}") for i, row in enumerate(rows)
        ]
        for name, rows in THREE.items()
    }
    checks = [item for item in make_study(stock, StudySettings(rows=60, checks=1.0)).items if item.kind == "check"]
    assert len(checks) == 60
    assert all(len(set(item.replies)) == 2 for item in checks)
    alike = {name: [dataclasses.replace(row, reference="Oh.") for row in rows] for name, rows in THREE.items()}
    with pytest.raises(ConfigError, match="two different replies of people"):
        make_study(alike, StudySettings(rows=60, checks=1.0))


def test_the_seed_draws_everything():
    one, again, other = (make_study(THREE, StudySettings(rows=20, seed=seed)).key() for seed in (0, 0, 1))
    assert one == again
    assert one["items"] != other["items"]


UNREFERENCED = {name: [dataclasses.replace(row, reference="") for row in rows] for name, rows in THREE.items()}


@pytest.mark.parametrize(
    ("systems", "changes", "message", "mended"),
    [
        (THREE, {"rows": 61}, "rows = 61, but the systems answer 60 contexts", {"rows": 60}),
        (THREE, {"form": "likert", "comparisons": 2}, "compares nothing; leave it out", {"form": "likert"}),
        (THREE, {"comparisons": 4}, "comparisons = 4, but 3 systems have 3 pairs; lower it", {"comparisons": 3}),
        ({"ours": THREE["ours"]}, {}, "form = 'pairs' compares two or more", {"form": "likert"}),
        (UNREFERENCED, {}, "set checks = 0", {"checks": 0.0}),
        (THREE, {"form": "ranks"}, "form = 'ranks' must be 'pairs' or 'likert'", {"form": "pairs"}),
        (THREE, {"repeats": 0.6}, r"repeats = 0\.6 must lie in \[0, 0\.5\]", {"repeats": 0.5, "checks": 0.0}),
        (THREE, {"repeats": 0.5, "checks": 1.0}, "that are no checks; lower it", {"repeats": 0.2, "checks": 1.0}),
        (THREE, {"checks": 1.5}, r"checks = 1\.5 must lie in \[0, 1\]", {"checks": 1.0}),
    ],
)
def test_what_cannot_be_drawn_is_named_and_the_advice_works(systems, changes, message, mended):
    with pytest.raises(ConfigError, match=message):
        make_study(systems, StudySettings(**{"rows": 20, **changes}))
    assert make_study(systems, StudySettings(**{"rows": 20, **mended})).items


def test_the_page_holds_the_study_and_asks_nobody_else():
    nasty = "</script><script>alert(1)</script> $study & <b>"
    systems = {name: [dataclasses.replace(row, response=f"{name} {nasty}") for row in system(name)] for name in "ab"}
    study = make_study(systems, StudySettings(rows=5, checks=0, repeats=0))
    html = page(study.shown())
    assert html.count("</script>") == 2
    found = re.search(r'<script id="study" type="application/json">(.*?)</script>', html, re.DOTALL)
    assert json.loads(found.group(1)) == study.shown()
    assert not re.search(r"https?://|@import|src=", html)
    assert "default-src 'none'" in html


def test_the_sheet_has_an_empty_cell_for_each_aspect():
    study = make_study(THREE, StudySettings(rows=5))
    rows = list(csv.DictReader(sheet(study.shown()).splitlines(keepends=True)))
    assert len(rows) == len(study.items)
    for row, item in zip(rows, study.items, strict=True):
        assert tuple(row[f"reply_{i}"].lower().removeprefix("l: ") for i in (1, 2)) == item.replies
        assert row["context"] == f"S: {item.context[0]}\nL: oh\nS: {item.context[2]}"
        assert all(row[aspect] == "" for aspect in ASPECTS)


def test_no_cell_of_the_sheet_is_a_formula():
    signs = dict(zip("abcd", "=-+@", strict=True))
    systems = {
        name: [dataclasses.replace(row, response=f"{sign}1") for row in system(name)] for name, sign in signs.items()
    }
    shown = make_study(systems, StudySettings(rows=5, comparisons=6)).shown()
    assert {reply[0] for item in shown["items"] for reply in item["replies"]} >= set(signs.values())
    cells = [cell for row in csv.reader(sheet(shown).splitlines(keepends=True)) for cell in row]
    assert not [cell for cell in cells if cell.startswith(("=", "-", "+", "@"))]


def shown_in(browser, study, before=""):
    """The page of a study: at a host, since Chromium may take a moment to keep what pages of files store."""
    opened = browser.new_context().new_page()
    opened.add_init_script(before)
    opened.route("**/*", lambda route: route.fulfill(body=page(study.shown()), content_type="text/html"))
    opened.goto("http://study.test/rate.html")
    return opened


def named(opened, rater):
    opened.locator("#rater").fill(rater)
    opened.locator("#rater").press("Enter")


def test_a_file_without_answers_does_not_replace_those_of_the_page(browser, tmp_path):
    study = make_study(THREE, StudySettings(rows=5))
    (tmp_path / "key.json").write_text(json.dumps(study.key()))
    opened = shown_in(browser, study)
    named(opened, "ann")
    opened.locator("input[type=radio]").first.check()
    opened.locator("#load").set_input_files(tmp_path / "key.json")
    opened.get_by_text("This file cannot be read").wait_for()
    opened.reload()
    named(opened, "ann")
    assert opened.locator("input[type=radio]").first.is_checked()


@pytest.mark.parametrize("keeps", [True, False])
def test_two_raters_at_one_browser_have_answers_of_their_own(browser, keeps):
    without = "Object.defineProperty(window, 'localStorage', { get() { throw new Error('none'); } });"
    opened = shown_in(browser, make_study(THREE, StudySettings(rows=5)), before="" if keeps else without)
    answers = opened.locator("input[type=radio]")
    assert answers.count() == 0
    opened.get_by_text("Please give your name or number first.").wait_for()
    for rater, own in (("ann", 0), ("bob", 1)):
        named(opened, rater)
        opened.get_by_text(f"No answers of {rater} are kept here yet.").wait_for()
        assert not any(one.is_checked() for one in answers.all())
        answers.nth(own).check()
    if keeps:
        opened.reload()
        assert answers.count() == 0
    for rater, own in (("ann", 0), (" bob ", 1)):
        named(opened, rater)
        assert [place for place, one in enumerate(answers.all()) if one.is_checked()] == [own]
    with opened.expect_download() as download:
        opened.get_by_role("button", name="Save answers").click()
    assert download.value.suggested_filename == "answers-bob.json"
    saved = json.loads(download.value.path().read_text())
    assert (saved["rater"], list(saved["answers"].values())) == ("bob", [{"empathy": "2"}])
