"""A loaded run that answers."""

import json

import pytest

from empax.core.config import ConfigError
from empax.core.types import ATTRIBUTES, EMOTIONS
from empax.serving.session import Session


@pytest.fixture(scope="module")
def session(finished):
    return Session.load(finished)


def test_a_reply_comes_with_what_stands_behind_it(session):
    found = session.reply(["I finally passed my exam!", "Great!", "  I am so happy.  "])
    assert found.context == ("I finally passed my exam!", "Great!", "I am so happy.")
    assert tuple(found.attributes) == ATTRIBUTES
    assert found.attributes["sentiment"] == "high"
    assert found.emotion_prediction in EMOTIONS
    assert found.emotion_prediction == found.notes["emotion_by_head"][session.head]
    assert [set(exemplar) for exemplar in found.exemplars] == [
        {"id", "context", "response", "emotion", "attributes", "score"}
    ] * 2
    assert session.reply(["I finally passed my exam!", "Great!", "I am so happy."]) == found


def test_the_reply_depends_on_what_was_said(session):
    one, two = session.reply(["My dog died yesterday."]), session.reply(["We won the cup!"])
    assert one.attributes["sentiment"] == "low"
    assert two.attributes["sentiment"] == "high"
    assert [e["id"] for e in one.exemplars] != [e["id"] for e in two.exemplars]


@pytest.mark.parametrize("context", [[], [""], ["Hello.", "Hi!", "  \n"]])
def test_an_empty_context_is_refused(session, context):
    with pytest.raises(ConfigError, match="nothing to answer"):
        session.reply(context)


def test_a_context_longer_than_the_model_keeps_its_newest_turns(session):
    """The last turn alone is longer than all that is read, so what stood before it cannot matter."""
    last = " ".join(["My sister moved away last week and the house is so quiet without her."] * 6)
    long_ago = ["The table is made of wood."] * 200
    found = session.reply([*long_ago, last])
    assert found.response == session.reply([last]).response
    assert found.exemplars == session.reply(["A chair.", "A lamp.", last]).exemplars
    assert found.context == (*long_ago, last)


def test_a_run_that_is_not_there_or_not_finished_is_refused(finished, tmp_path):
    with pytest.raises(ConfigError, match="holds no run"):
        Session.load(tmp_path / "nowhere")
    (tmp_path / "config.json").write_text((finished / "config.json").read_text())
    with pytest.raises(ConfigError, match="not finished its prepare stage"):
        Session.load(tmp_path)
    config = json.loads((finished / "config.json").read_text())
    config["run"] = ["prepare"]
    kept = {name: config[name] for name in ("system", "seed", "run", "data", "reg", "prepare")}
    (tmp_path / "config.json").write_text(json.dumps(kept))
    with pytest.raises(ConfigError, match="not finished its evaluate stage"):
        Session.load(tmp_path)
