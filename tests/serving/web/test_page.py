"""The page in a real browser: a conversation, two users, a vote, three widths, and nothing from other hosts.

All but the first are slow; that one runs wherever there is a Chromium.
"""

import json
import time

import pytest

from empax.rating.answers import read_answers, read_key
from tests.serving.web.stub import Stub

WHY = {
    "emotion": "sad", "attributes": {"sentiment": "low"}, "facts": ["dog (IsA pet)"], "intents": ["ask", "hope"],
    "reasons": "I *lost* my keys.",
    "exemplars": [{"said": "<i>lost</i>", "reply": "Oh no.", "emotion": "sad", "score": 0.9, "source": "d1#2"}],
}  # fmt: skip


def Telling(name="stub"):  # noqa: N802
    return Stub(name, why=WHY)


def opened(browser, url, **options):
    """A page in a browser of its own, with the hosts that it asks and its errors."""
    page = browser.new_context(**options).new_page()
    hosts, errors = set(), []
    page.on("request", lambda request: hosts.add("/".join(request.url.split("/")[:3])))
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
    page.goto(url)
    page.locator(".side").first.wait_for(state="attached")
    return page, hosts, errors


def say(page, text):
    turns = page.locator(".turn").count()
    page.keyboard.type(text)  # the field has the focus
    page.keyboard.press("Enter")
    page.locator(".turn:not([aria-busy])").nth(turns + 1).wait_for()
    page.locator("#status:empty").wait_for(state="attached")


def test_a_conversation_by_keyboard_with_what_stands_behind_it(browser, served):
    _, url = served(Telling(), safety="The safety layer is on.")
    page, hosts, errors = opened(browser, url)
    assert page.locator("#safety").inner_text() == "The safety layer is on."
    page.locator("#text").press("Shift+Enter")
    assert page.locator("#text").input_value() == "\n"
    page.locator("#text").fill("")
    say(page, "<script>document.title = 'no'</script><b>x</b>")
    turns = page.locator(".turn")
    assert turns.nth(0).inner_text() == "<script>document.title = 'no'</script><b>x</b>"
    assert "heard <script>" in turns.nth(1).inner_text()
    assert page.title() == "empax"
    assert page.locator(".turn script, .turn b, .turn i").count() == 0
    say(page, "And now?")
    assert turns.count() == 4
    page.locator("summary", has_text="Why this reply").last.click()
    shown = page.locator(".why").last.inner_text()
    for piece in ("sad", "low", "dog (IsA pet)", "ask → hope", "I *lost* my keys.", "<i>lost</i> → Oh no.",
                  "score 0.9, d1#2"):  # fmt: skip
        assert piece in shown
    page.get_by_role("button", name="New conversation").click()
    page.locator(".side").wait_for(state="attached")
    page.locator(".turn").first.wait_for(state="detached")
    assert hosts == {url}
    assert errors == []


@pytest.mark.slow
def test_a_reply_is_seen_while_it_is_written_and_a_new_conversation_gives_it_up(browser, served):
    stub = Stub()
    _, url = served(stub)
    page, _, errors = opened(browser, url)
    stub.going_on.clear()
    page.keyboard.type("Hello <b>you</b>.")
    page.keyboard.press("Enter")
    page.locator(".turn[aria-busy]", has_text="stub heard").wait_for()
    assert page.locator(".turn[aria-busy]").inner_text() == "stub heard"
    assert page.get_by_role("button", name="Send").is_disabled()
    page.get_by_role("button", name="New conversation").click()
    page.locator(".turn").first.wait_for(state="detached")
    time.sleep(0.5)
    stub.going_on.set()
    assert stub.given_up.wait(10)
    page.locator("#text").focus()
    say(page, "Again.")
    assert stub.heard[-1] == ("Again.",)
    assert errors == []


@pytest.mark.slow
def test_settings_reach_the_model_and_a_refusal_is_read_out(browser, served):
    stub = Stub()
    _, url = served(stub)
    page, _, _ = opened(browser, url)
    page.locator("#settings summary").click()
    page.locator("#max_tokens").fill("999")
    page.locator("#text").fill("Hello")
    page.locator("#text").press("Enter")
    page.locator("#status.error").wait_for()
    assert "max_tokens = 999" in page.get_by_role("status").inner_text()
    assert page.locator("#text").input_value() == "Hello"  # nothing is lost
    assert page.locator(".turn").count() == 0


@pytest.mark.slow
def test_two_users_at_once_do_not_see_each_other(browser, served):
    _, url = served(Stub())
    one, two = (opened(browser, url)[0] for _ in range(2))
    say(one, "first user")
    say(two, "second user")
    say(one, "first again")
    assert [turn.inner_text().split("\n")[0] for turn in two.locator(".turn").all()] == [
        "second user",
        "stub heard second user",
    ]
    assert one.locator(".turn").count() == 4


@pytest.mark.slow
def test_a_vote_between_two_that_nobody_can_tell_apart(browser, served, tmp_path):
    _, url = served(Telling("ours"), Stub("theirs"), votes=tmp_path)
    page, _, errors = opened(browser, url)
    say(page, "Hello.")
    assert page.locator(".why").count() == 0
    first = page.locator(".side").first.locator(".turn").nth(1).inner_text().split()[0]
    for aspect, side in (("empathy", "A"), ("relevance", "Tie"), ("fluency", "B")):
        page.get_by_role("radiogroup", name=aspect).get_by_label(side).check()
    page.get_by_role("button", name="Vote").click()
    page.locator("#status", has_text="Thank you").wait_for()
    assert f"A was {first}" in page.get_by_role("status").inner_text()
    (answer,) = read_answers(list(tmp_path.glob("answers-*.json")), read_key(tmp_path / "key.json"))
    assert answer.values == {"empathy": 1, "relevance": 0, "fluency": -1}
    assert answer.item.systems[0] == first
    assert errors == []


@pytest.mark.slow
def test_neither_of_two_replies_is_seen_before_both_are_whole(browser, served, tmp_path):
    stubs = Stub("ours"), Stub("theirs")
    _, url = served(*stubs, votes=tmp_path)
    page, _, errors = opened(browser, url)
    first, second = (page.locator(".side").nth(i).locator(".turn") for i in range(2))
    stubs[1].going_on.clear()
    page.keyboard.type("Hello.")
    page.keyboard.press("Enter")
    assert stubs[1].busy.wait(10)
    time.sleep(0.5)
    assert [side.all_inner_texts() for side in (first, second)] == [["Hello.", "…"]] * 2
    assert page.locator(".turn[aria-busy]").count() == 2
    stubs[1].going_on.set()
    page.locator("#status:empty").wait_for(state="attached")
    assert {side.nth(1).inner_text() for side in (first, second)} == {"ours heard Hello.", "theirs heard Hello."}
    assert page.locator(".turn[aria-busy]").count() == 0
    assert errors == []


@pytest.mark.slow
def test_a_vote_waits_for_replies_that_are_being_written(browser, served, tmp_path):
    stubs = Stub("ours"), Stub("theirs")
    _, url = served(*stubs, votes=tmp_path)
    page, _, errors = opened(browser, url)
    say(page, "Hello.")
    for row in page.get_by_role("radiogroup").all():
        row.get_by_label("A", exact=True).check()
    for stub in stubs:
        stub.going_on.clear()
    page.locator("#text").fill("And now?")
    page.locator("#text").press("Enter")
    page.get_by_role("button", name="Vote").click()
    page.locator("#status.error", has_text="Vote once both replies are there.").wait_for()
    assert not list(tmp_path.glob("answers-*.json"))
    for stub in stubs:
        stub.going_on.set()
    page.locator("#status:empty").wait_for(state="attached")
    page.get_by_role("button", name="Vote").click()
    page.locator("#status", has_text="Thank you").wait_for()
    assert page.locator("#vote").is_hidden()
    assert errors == []


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_nothing_is_cut_from_narrow_to_wide(browser, served, scheme, tmp_path):
    _, url = served(Telling("ours"), Telling("theirs"), votes=tmp_path, safety="One line of safety. " * 5)
    page, _, _ = opened(browser, url, color_scheme=scheme)
    say(page, "word " * 40 + "x" * 300)
    for width in (390, 820, 1600):
        page.set_viewport_size({"width": width, "height": 800})
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        cut = page.evaluate(
            "[...document.querySelectorAll('.turn')].filter(t => t.scrollWidth > t.clientWidth + 1).length"
        )
        assert cut == 0
        side = page.locator(".side")
        one, two = side.first.bounding_box(), side.last.bounding_box()
        assert (one["y"] == two["y"]) == (width > 390)  # side by side where there is room
        page.screenshot(path=tmp_path / f"{width}-{scheme}.png", full_page=True)
    colour = json.loads(page.evaluate("JSON.stringify(getComputedStyle(document.body).backgroundColor.match(/\\d+/g))"))
    assert (int(colour[0]) < 100) == (scheme == "dark")


def stop(server):
    server.should_exit = server.force_exit = True
    while server.servers and any(one.is_serving() for one in server.servers):
        time.sleep(0.02)
    time.sleep(0.3)


@pytest.mark.slow
def test_the_conversation_stays_while_the_server_is_started_again(browser, served, tmp_path):
    first = Stub("ours"), Stub("theirs")
    server, url = served(*first, votes=tmp_path)
    page, hosts, _ = opened(browser, url)
    say(page, "one")
    names = [side.locator(".turn").nth(1).inner_text().split()[0] for side in page.locator(".side").all()]
    for stub in first:
        stub.busy.clear()
        stub.going_on.clear()  # the server goes down in the middle of the next replies
    page.keyboard.type("two")
    page.keyboard.press("Enter")
    while not any(stub.busy.is_set() for stub in first):
        time.sleep(0.02)
    stop(server)
    for stub in first:
        stub.going_on.set()
    page.locator("#status.error", has_text="Your conversation is kept").wait_for()
    assert "one" in page.locator(".turn").first.inner_text()
    second = Stub("theirs"), Stub("ours")
    served(*second, port=int(url.rpartition(":")[2]), votes=tmp_path)
    page.locator("#status:empty").wait_for(state="attached", timeout=20_000)
    assert [side.locator(".turn").count() for side in page.locator(".side").all()] == [4, 4]
    assert [side.locator(".turn").last.inner_text() for side in page.locator(".side").all()] == [
        f"{name} heard two"
        for name in names  # still the same sides
    ]
    for stub in second:
        assert stub.heard == [("one", f"{stub.name} heard one", "two")]
    assert page.locator("#text").input_value() == ""
    for row in page.get_by_role("radiogroup").all():
        row.get_by_label("A", exact=True).check()
    page.get_by_role("button", name="Vote").click()
    page.locator("#status", has_text=f"A was {names[0]}").wait_for()
    assert hosts == {url}


@pytest.mark.slow
def test_a_page_that_is_opened_too_early_waits_for_the_server(browser, served):
    _, url = served(Stub())
    page = browser.new_page()
    page.route("**/about", lambda route: route.abort())
    page.goto(url)
    page.locator("#status.error", has_text="does not answer").wait_for()
    page.unroute("**/about")
    page.locator(".side").wait_for(state="attached", timeout=10_000)


@pytest.mark.slow
def test_every_part_has_a_role_and_a_name(browser, served):
    _, url = served(Telling(), safety="On.")
    page, _, _ = opened(browser, url)
    say(page, "Hello.")
    assert page.get_by_role("heading", level=1).count() == 1
    assert page.get_by_role("log", name="Conversation").get_by_role("group", name="You").inner_text() == "Hello."
    assert "stub heard Hello." in page.get_by_role("group", name="Reply").inner_text()
    assert page.get_by_role("textbox", name="Tell what happened").evaluate("e => e === document.activeElement")
    reached = []
    for _ in range(6):
        page.keyboard.press("Tab")
        reached.append(page.evaluate("document.activeElement.id || document.activeElement.textContent"))
    assert reached[:2] == ["send", "Settings"]
    assert {"new", "Why this reply"} <= set(reached)
    unnamed = page.evaluate(
        "[...document.querySelectorAll('button, input, textarea')].filter("
        "e => !e.textContent.trim() && !(e.labels && e.labels.length)).length"
    )
    assert unnamed == 0
    page.emulate_media(reduced_motion="reduce")
    assert page.locator(".turn").last.evaluate("e => getComputedStyle(e).animationName") == "none"


@pytest.mark.slow
def test_a_token_is_asked_for_and_kept_for_the_tab(browser, served):
    _, url = served(Stub(), token="abc")
    page = browser.new_page()
    page.goto(url)
    page.locator("#token").fill("abc")
    page.locator("#token").press("Enter")
    page.locator(".side").wait_for(state="attached")
    say(page, "Hello.")
    assert page.locator(".turn").nth(1).inner_text().startswith("stub heard Hello.")
