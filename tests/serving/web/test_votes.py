"""Two systems side by side: blinded, and counted by `empax rate score`."""

import asyncio
import json
from concurrent.futures import ThreadPoolExecutor

import pytest

from empax.core.config import ConfigError
from empax.core.files import DataError
from empax.rating.answers import read_answers, read_key
from empax.serving.web.app import ServerSettings, make_app
from empax.serving.web.votes import Votes
from tests.serving.web.stub import Stub
from tests.serving.web.test_app import talk

BETTER_A = {"empathy": "a", "relevance": "tie", "fluency": "b"}


def test_a_conversation_is_blinded_until_its_vote(tmp_path):
    app = make_app([Stub("ours"), Stub("theirs")], ServerSettings(votes=tmp_path, per_minute=0))

    async def go(http):
        drawn = []
        about = (await http.get("/about")).json()
        assert about["compares"]
        assert "ours" not in json.dumps(about)
        for i in range(16):
            name = (await http.post("/conversations", json={})).json()["conversation"]
            body = {"messages": [{"role": "user", "content": "Hello."}]}
            said = {}
            for side in "ab":
                answer = (await http.post("/v1/chat/completions", json={**body, "model": f"{name}/{side}"})).json()
                assert answer["model"] == f"{name}/{side}"
                assert "empax" not in answer["choices"][0]
                said[side] = answer["choices"][0]["message"]["content"].split()[0]
            vote = {"conversation": name, "rater": f"rater-{i % 2}", "answers": BETTER_A}
            assert (await http.post("/votes", json={**vote, "answers": {"empathy": "a"}})).status_code == 400
            assert (await http.post("/votes", json={**vote, "answers": {"empathy": []}})).status_code == 400
            embedded = await http.post("/v1/embeddings", json={"model": f"{name}/a", "input": "x"})
            assert (embedded.status_code, "ours" in embedded.text) == (400, False)
            assert (await http.post("/votes", json={**vote, "rater": "../x"})).json()["error"]["param"] == "rater"
            assert (await http.post("/votes", json=vote)).json() == said
            assert (await http.post("/votes", json=vote)).status_code == 404
            assert (await http.post("/v1/chat/completions", json={**body, "model": f"{name}/a"})).status_code == 404
            drawn.append(said["a"])
        return drawn

    drawn = talk(app, go)
    assert set(drawn) == {"ours", "theirs"}
    key = read_key(tmp_path / "key.json")
    answers = read_answers(sorted(tmp_path.glob("answers-*.json")), key)
    assert len(answers) == 16
    assert {answer.rater for answer in answers} == {"rater-0", "rater-1"}
    by_item = {answer.item.number: answer for answer in answers}
    assert [by_item[i + 1].item.systems[0] for i in range(16)] == drawn
    assert by_item[1].values == {"empathy": 1, "relevance": 0, "fluency": -1}
    assert "Hello" not in "".join(path.read_text() for path in tmp_path.iterdir())


def test_a_blinded_reply_streams_in_one_piece_whoever_wrote_it(tmp_path):
    app = make_app([Stub("ours"), Stub("theirs")], ServerSettings(votes=tmp_path))

    async def go(http):
        name = (await http.post("/conversations", json={})).json()["conversation"]
        body = {"messages": [{"role": "user", "content": "Hello."}], "stream": True}
        return [(await http.post("/v1/chat/completions", json={**body, "model": f"{name}/{s}"})).text for s in "ab"]

    told = [[json.loads(line.removeprefix("data: ")) for line in text.split("\n\n")[:-2]] for text in talk(app, go)]
    pieces = [[event["choices"][0]["delta"].get("content") for event in events] for events in told]
    assert sorted(pieces) == [["", f"{name} heard Hello.", None] for name in ("ours", "theirs")]


def test_votes_go_on_after_a_restart_and_never_mix_systems(tmp_path):
    begun = Votes(tmp_path, ("ours", "theirs")).begin()
    sides = [Votes(tmp_path, ("theirs", "ours")).system(f"{begun}/{side}") for side in "ab"]
    assert sorted(sides) == ["ours", "theirs"]
    for name in (begun, None):
        votes = Votes(tmp_path, ("ours", "theirs"))
        who = votes.vote(name or votes.begin(), "me", BETTER_A)
        assert name is None or who == dict(zip("ab", sides, strict=True))
    assert votes.system(f"{begun}/a") is None  # over
    assert votes.system("guessed/a") is None
    assert sorted(read_key(tmp_path / "key.json").items) == [1, 2]
    with pytest.raises(ConfigError, match="has votes on ours and theirs; give --votes another folder"):
        Votes(tmp_path, ("ours", "others"))
    (tmp_path / "key.json").write_text("{}")
    with pytest.raises(DataError, match=r"key\.json is not the key of a study"):
        Votes(tmp_path, ("ours", "theirs"))


def test_servers_that_share_a_folder_count_each_vote_for_its_own_conversation(tmp_path):
    servers = [Votes(tmp_path, ("ours", "theirs")) for _ in range(2)]
    named = [servers[i % 2].begin() for i in range(16)]
    who = [servers[i % 2].vote(name, f"rater-{i % 3}", BETTER_A) for i, name in enumerate(named)]
    key = read_key(tmp_path / "key.json")
    assert [dict(zip("ab", key.items[i + 1].systems, strict=True)) for i in range(16)] == who
    assert [item["id"] for item in json.loads((tmp_path / "key.json").read_text())["items"]] == named
    assert len(read_answers(sorted(tmp_path.glob("answers-*.json")), key)) == 16
    assert servers[0].vote(named[1], "me", BETTER_A) is None  # over, at the other server
    assert servers[0].system(f"{named[1]}/a") is None


def test_a_vote_waits_while_another_server_writes(tmp_path):
    one, two = (Votes(tmp_path, ("ours", "theirs")) for _ in range(2))
    with ThreadPoolExecutor(1) as pool:
        with one._newest_key():
            voting = pool.submit(two.vote, two.begin(), "me", BETTER_A)
            with pytest.raises(TimeoutError):
                voting.result(0.2)
        assert voting.result(20)


def test_a_server_answers_others_while_a_vote_waits(tmp_path):
    app = make_app([Stub("ours"), Stub("theirs")], ServerSettings(votes=tmp_path))
    other = Votes(tmp_path, ("ours", "theirs"))
    vote = {"conversation": other.begin(), "rater": "me", "answers": BETTER_A}

    async def go(http):
        async with asyncio.timeout(20):
            with other._newest_key():
                voting = asyncio.create_task(http.post("/votes", json=vote))
                await asyncio.sleep(0.2)
                assert (await http.get("/healthz")).status_code == 200
                assert not voting.done()
            return await voting

    assert talk(app, go).status_code == 200


def test_a_vote_that_cannot_be_kept_is_the_servers_failure(tmp_path, caplog):
    app = make_app([Stub("ours"), Stub("theirs")], ServerSettings(votes=tmp_path))
    (tmp_path / "LOCK").unlink()
    (tmp_path / "LOCK").mkdir()
    vote = {"conversation": "0" * 16, "rater": "me", "answers": BETTER_A}

    async def go(http):
        return await http.post("/votes", json=vote)

    failed = talk(app, go)
    assert (failed.status_code, failed.json()["error"]["type"]) == (500, "server_error")
    assert str(tmp_path) not in failed.text
    assert f"{tmp_path}/LOCK cannot be written (Is a directory)" in caplog.text
