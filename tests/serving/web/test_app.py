"""The server with a stub for the model: forms of OpenAI, the queue, limits, and what nobody may see."""

import asyncio
import base64
import functools
import json
import logging
import re
from types import SimpleNamespace

import httpx
import numpy as np
import pytest

from empax.core.config import ConfigError
from empax.serving.web import gate
from empax.serving.web.app import ServerSettings, make_app
from empax.serving.web.batcher import Batcher, FullError
from empax.serving.web.openai import ApiError, chat_request
from tests.serving.web.stub import Stub

SAY = {"model": "stub", "messages": [{"role": "user", "content": "I lost my keys."}]}


def talk(app, go):
    """What the coroutine function `go` gives, called with a client of the application."""

    async def with_client():
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as http:
            return await go(http)

    return asyncio.run(with_client())


def ask(path, body=SAY, *, stub=None, headers=None, **settings):
    async def go(http):
        return await (http.get(path, headers=headers) if body is None else http.post(path, json=body, headers=headers))

    return talk(make_app([stub or Stub()], ServerSettings(**settings)), go)


def begun(http, text, **more):
    body = {**SAY, "messages": [{"role": "user", "content": text}], **more}
    return asyncio.create_task(http.post("/v1/chat/completions", json=body))


async def busied(http, stub):
    """A request that the stub, busy from now on, has begun to answer."""
    stub.free.clear()
    first = begun(http, "0")
    await asyncio.to_thread(stub.busy.wait, 20)
    return first


async def queued(app, count):
    """Waits until so many requests wait."""
    async with asyncio.timeout(20):
        while len(app.state.server.batcher) != count:
            await asyncio.sleep(0.01)


def chat(**changes):
    return ask("/v1/chat/completions", {**SAY, **changes})


def test_models_read_the_signs_of_a_keyboard():
    for content in ("I can’t “go”.", [{"type": "text", "text": "I can’t "}, {"type": "text", "text": "“go”."}]):
        asked = chat_request({**SAY, "messages": [{"role": "user", "content": content}]}).asked
        assert asked[0].turns == ('I can\'t "go".',)


def test_a_reply_has_openais_form_with_choices_usage_and_stop():
    answer = chat(n=2, stop=[" my"]).json()
    assert answer["object"] == "chat.completion"
    assert answer["model"] == "stub"
    texts = [choice["message"]["content"] for choice in answer["choices"]]
    assert texts == ["stub heard I lost"] * 2
    assert [choice["finish_reason"] for choice in answer["choices"]] == ["stop"] * 2
    assert answer["usage"] == {"prompt_tokens": 1, "completion_tokens": 8, "total_tokens": 9}
    assert answer["choices"][0]["empax"] == {"emotion": "sad"}


def test_a_stream_says_the_same_in_pieces_and_ends():
    answer = chat(stream=True, n=2, stream_options={"include_usage": True})
    assert answer.headers["content-type"].startswith("text/event-stream")
    *events, last = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
    assert last == "[DONE]"
    *said, usage = map(json.loads, events)
    assert usage["usage"] == {"prompt_tokens": 1, "completion_tokens": 8, "total_tokens": 9}
    texts = ["", ""]
    for choice in (choice for event in said for choice in event["choices"]):
        texts[choice["index"]] += choice["delta"].get("content", "")
    assert texts == ["stub heard I lost my keys."] * 2
    assert said[-1]["choices"][0]["finish_reason"] == "stop"
    assert len(said) > 12
    cut = chat(stream=True, stop=["keys"]).text
    assert "lost" in cut
    assert "keys" not in cut


def test_a_fixed_answer_waits_for_no_model_and_needs_no_place_in_the_queue():
    stub = Stub()
    app = make_app([stub], ServerSettings(places=1))

    async def go(http):
        first = await busied(http, stub)
        waiting = begun(http, "1")
        await queued(app, 1)
        answers = [await begun(http, "2"), await begun(http, "danger"), await begun(http, "danger", stream=True)]
        stub.free.set()
        await asyncio.gather(first, waiting)
        return answers

    full, *fixed = talk(app, go)
    assert full.status_code == 503
    for answer in fixed:
        assert "Please call somebody." in answer.text
        assert '"fixed"' in answer.text
    assert stub.batches == [["0"], ["1"]]


def test_more_choices_than_may_wait_are_no_matter_of_waiting():
    answer = ask("/v1/chat/completions", {**SAY, "n": 3}, places=2)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "n")
    assert "n = 3 is more than the 2 replies" in answer.text
    assert ask("/v1/chat/completions", {**SAY, "n": 2}, places=2).status_code == 200


def test_blanks_around_a_turn_are_not_read():
    said = [("user", " Hi.\n"), ("assistant", "\tHello. "), ("user", "\n  I lost my keys.  ")]
    stub = Stub()
    body = {**SAY, "messages": [{"role": role, "content": text} for role, text in said]}
    assert ask("/v1/chat/completions", body, stub=stub).status_code == 200
    assert stub.heard == [("Hi.", "Hello.", "I lost my keys.")]


def test_what_fails_within_a_stream_is_told_in_it_and_what_fails_before_by_a_status(caplog):
    stub = Stub()
    before = ask("/v1/chat/completions", {**SAY, "stream": True, "max_tokens": 999}, stub=stub)
    assert (before.status_code, before.json()["error"]["param"]) == (400, "max_tokens")
    text = ask("/v1/chat/completions", {"model": "stub", "stream": True,
               "messages": [{"role": "user", "content": "fail late"}]}, stub=stub).text  # fmt: skip
    *_, last, _ = text.split("\n\n")
    assert " heard" in text
    assert json.loads(last.removeprefix("data: "))["error"]["type"] == "server_error"
    assert "secret" not in text + caplog.text
    assert "[DONE]" not in text


@pytest.mark.parametrize(
    ("changes", "param", "status"),
    [
        ({"temperature": 3}, "temperature", 400),
        ({"temperature": True}, "temperature", 400),
        ({"temperature": 0.00001}, "temperature", 400),
        ({"temperature": -0.5}, "temperature", 400),
        ({"temperature": 0, "top_p": 0.5}, "top_p", 400),
        ({"top_p": 0}, "top_p", 400),
        ({"top_p": 1.5}, "top_p", 400),
        ({"max_tokens": 0}, "max_tokens", 400),
        ({"max_tokens": 999}, "max_tokens", 400),
        ({"max_tokens": 4, "max_completion_tokens": 4}, "max_completion_tokens", 400),
        ({"max_completion_tokens": 999}, "max_completion_tokens", 400),
        ({"n": 9}, "n", 400),
        ({"n": 0}, "n", 400),
        ({"seed": 1.5}, "seed", 400),
        ({"stop": [""]}, "stop", 400),
        ({"stop": [*"abcde"]}, "stop", 400),
        ({"stream": 1}, "stream", 400),
        ({"stream_options": {"include_usage": True}}, "stream_options", 400),
        ({"stream": True, "stream_options": {"usage": True}}, "stream_options", 400),
        ({"presence_penalty": 1}, "presence_penalty", 400),
        ({"temprature": 1}, "temprature", 400),
        ({"model": "gpt"}, "model", 404),
        ({"messages": []}, "messages", 400),
        ({"messages": [{"role": "system", "content": "x"}, *SAY["messages"]]}, "messages[0].role", 400),
        ({"messages": [{"role": "assistant", "content": "x"}]}, "messages[0].role", 400),
        ({"messages": [{"role": "user", "content": 7}]}, "messages[0].content", 400),
        ({"messages": [{"role": "user", "content": ["x"]}]}, "messages[0].content", 400),
        ({"messages": [{"role": "user", "content": " "}]}, "messages[0].content", 400),
        ({"messages": [{"role": "user", "content": "x" * 8001}]}, "messages[0].content", 400),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(changes, param, status):
    answer = chat(**changes)
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"
    assert param.split("[")[0] in error["message"]


def test_what_asks_for_nothing_is_no_error():
    assert chat(presence_penalty=0, logprobs=False, user="me", top_p=1, temperature=0, top_k=None).status_code == 200
    assert chat(
        temperature=2, top_p=None, n=8, stop=[*"abcd"], messages=[{"role": "user", "content": "x" * 8000}]
    ).is_success
    parts = [{"type": "text", "text": "I "}, {"type": "text", "text": "lost."}]
    said = chat(messages=[{"role": "user", "content": parts}]).json()["choices"][0]["message"]["content"]
    assert said == "stub heard I lost."
    for wrong in ({}, {"text": None}, {"text": {"a": 1}}):
        answer = chat(messages=[{"role": "user", "content": [{"type": "text", **wrong}]}])
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "messages[0].content")


def test_embeddings_as_numbers_and_in_base64():
    numbers = ask("/v1/embeddings", {"model": "stub", "input": ["ab", "abc"]}).json()
    assert [row["embedding"] for row in numbers["data"]] == [[2.0, 0.5], [3.0, 0.5]]
    assert numbers["usage"] == {"prompt_tokens": 5, "total_tokens": 5}
    packed = ask("/v1/embeddings", {"model": "stub", "input": "ab", "encoding_format": "base64"}).json()
    assert np.frombuffer(base64.b64decode(packed["data"][0]["embedding"]), "<f4").tolist() == [2.0, 0.5]
    assert len(ask("/v1/embeddings", {"model": "stub", "input": ["a"] * 256}).json()["data"]) == 256
    for changes, param in (({"input": []}, "input"), ({"input": ["a"] * 257}, "input"), ({"input": [3]}, "input[0]"),
                           ({"input": "a", "encoding_format": "hex"}, "encoding_format")):  # fmt: skip
        assert ask("/v1/embeddings", {"model": "stub", **changes}).json()["error"]["param"] == param


def test_models_health_metrics_and_what_there_is_not():
    assert [model["id"] for model in ask("/v1/models", None).json()["data"]] == ["stub"]
    assert ask("/v1/models/stub", None).json()["id"] == "stub"
    assert ask("/healthz", None).json() == {"status": "ok"}
    missing = ask("/v1/nothing", None)
    assert missing.status_code == 404
    assert missing.json()["error"]["type"] == "invalid_request_error"
    other = ask("/v1/chat/completions", None)
    assert (other.status_code, other.headers["allow"]) == (405, "POST")
    app = make_app([Stub()], ServerSettings())

    async def go(http):
        await http.post("/v1/chat/completions", json=SAY)
        return (await http.get("/metrics")).text

    numbers = talk(app, go)
    assert 'empax_requests_total{path="/v1/chat/completions",status="200"} 1.0' in numbers
    assert 'empax_tokens_total{kind="written"} 4.0' in numbers


def test_a_body_must_be_json_of_whole_characters_and_not_too_long():
    app = make_app([Stub()], ServerSettings())

    async def go(http):
        url, json_type = "/v1/chat/completions", {"content-type": "application/json"}
        yield_long = (b"x" * 100_000 for _ in range(5))
        return [
            await http.post(url, content=b"{", headers=json_type),
            await http.post(url, content=b"[" * 100_000, headers=json_type),
            await http.post(url, content=b"{}", headers={"content-type": "text/plain"}),
            await http.post(url, content=json.dumps(SAY), headers={"content-type": "Application/JSON; charset=utf-8"}),
            await http.post(url, content=b"x" * 300_000, headers=json_type),
            await http.post(url, content=aiter_of(yield_long), headers=json_type),
            await http.post(url, content=json.dumps({**SAY, "\ud800": 1}), headers=json_type),
        ]

    answers = talk(app, go)
    assert [answer.status_code for answer in answers] == [400, 400, 415, 200, 413, 413, 400]
    assert answers[-1].json()["error"]["param"] == "?"  # half a character


async def aiter_of(parts):
    for part in parts:
        yield part


def test_those_that_wait_together_are_answered_together_and_beyond_the_queue_is_503():
    stub = Stub(batch_size=3)
    app = make_app([stub], ServerSettings(places=5))

    async def go(http):
        say, first = functools.partial(begun, http), await busied(http, stub)
        rest = [say(str(i)) for i in range(1, 4)]
        await queued(app, 3)
        rest += [say("warm", temperature=1.0), say("4")]
        await queued(app, 5)
        full = await say("too many")
        stub.free.set()
        return full, [(await task).json()["choices"][0]["message"]["content"] for task in (first, *rest)]

    full, said = talk(app, go)
    assert full.status_code == 503
    assert int(full.headers["retry-after"]) >= 1
    assert full.json()["error"]["type"] == "server_error"
    assert said == [f"stub heard {text}" for text in ("0", "1", "2", "3", "warm", "4")]
    assert stub.batches == [["0"], ["1", "2", "3"], ["warm"], ["4"]]


def test_a_client_that_goes_away_is_not_answered_and_one_that_fails_spoils_no_other(caplog):
    stub = Stub(batch_size=3)
    app = make_app([stub], ServerSettings())

    async def go(http):
        say, first = functools.partial(begun, http), await busied(http, stub)
        gone, broken, fine = say("gone"), say("break"), say("fine")
        await queued(app, 3)
        gone.cancel()
        await queued(app, 2)  # its place is free at once
        stub.free.set()
        return [(await task).status_code for task in (first, broken, fine)]

    with caplog.at_level(logging.INFO, "empax.serve"):
        assert talk(app, go) == [200, 500, 200]
    assert stub.batches == [["0"], ["break", "fine"], ["break"], ["fine"]]
    assert re.search(r"RuntimeError in \S+/stub\.py:\d+", caplog.text)
    assert "secret words" not in caplog.text


def test_an_http_disconnect_takes_a_request_out_of_the_queue():
    stub = Stub()
    app = make_app([stub], ServerSettings())
    scope = {
        "type": "http", "method": "POST", "path": "/v1/chat/completions", "raw_path": b"", "query_string": b"",
        "headers": [(b"content-type", b"application/json"), (b"host", b"localhost")], "client": ("x", 1),
    }  # fmt: skip

    async def go():
        messages = [{"type": "http.request", "body": json.dumps(SAY).encode()}]
        stub.free.clear()

        async def receive():
            if messages:
                return messages.pop()
            await asyncio.to_thread(stub.busy.wait, 20)
            return {"type": "http.disconnect"}

        sent = []

        async def send(message):
            sent.append(message)

        await app(scope, receive, send)
        stub.free.set()
        return sent[0]["status"]

    assert asyncio.run(go()) == 499


def test_the_log_has_texts_only_where_it_is_asked_to(caplog):
    with caplog.at_level(logging.INFO, "empax.serve"):
        ask("/v1/chat/completions")
        assert "POST /v1/chat/completions 200" in caplog.text
        assert "keys" not in caplog.text
        ask("/v1/chat/completions", log_texts=True)
        assert "keys" in caplog.text


def test_a_token_is_asked_for_where_there_is_one():
    stranger = ask("/v1/models", None, token="abc")
    assert (stranger.status_code, stranger.headers["www-authenticate"]) == (401, "Bearer")
    wrong = ask("/v1/models", None, token="abc", headers={"Authorization": "Bearer abd"}).json()["error"]
    assert (wrong["type"], wrong["code"]) == ("authentication_error", "invalid_api_key")
    assert ask("/v1/models", None, token="abc", headers={"Authorization": "Bearer abc"}).status_code == 200
    assert ask("/metrics", None, token="abc").status_code == 401
    assert [ask(path, None, token="abc").status_code for path in ("/", "/healthz", "/page.js")] == [200] * 3


def test_other_hosts_names_and_other_sites_are_refused():
    for host in ("localhost", "localhost:8000", "[::1]:8000"):
        assert ask("/v1/models", None, hosts=("localhost",), headers={"Host": host}).status_code == 200
    assert ask("/v1/models", None, hosts=("localhost",), headers={"Host": "evil.example"}).status_code == 403
    for path in ("/", "/v1/models", "/nothing"):
        policy = ask(path, None).headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy


def test_one_address_may_ask_so_often():
    app = make_app([Stub()], ServerSettings(per_minute=2))

    async def go(http):
        return [await http.post("/v1/chat/completions", json=SAY) for _ in range(3)]

    *fine, refused = talk(app, go)
    assert [answer.status_code for answer in fine] == [200, 200]
    assert refused.status_code == 429
    assert 1 <= int(refused.headers["retry-after"]) <= 30
    assert refused.json()["error"]["type"] == "rate_limit_error"


def test_an_address_has_a_burst_and_then_one_request_each_time_one_is_due(monkeypatch):
    now, rates = [100.0], gate.Rates(2)
    monkeypatch.setattr(gate, "time", SimpleNamespace(monotonic=lambda: now[0]))

    def told(address="a"):
        try:
            rates.check(address)
        except ApiError as error:
            return error.headers["Retry-After"]
        return "fine"

    assert [told(), told(), told(), told("b")] == ["fine", "fine", "30", "fine"]
    now[0] += 12
    assert told() == "18"
    now[0] += 18
    assert [told(), told()] == ["fine", "30"]
    now[0] += 1000
    assert [told(), told(), told()] == ["fine", "fine", "30"]


def test_who_finds_the_queue_full_is_told_how_long_the_others_take():
    batcher = Batcher(places=3)
    batcher._waiting.extend([None] * 3)  # pyright: ignore[reportArgumentType]
    for seconds, said in ((7.2, 22), (0.01, 1)):
        batcher._seconds_per_row = seconds
        with pytest.raises(FullError) as full:
            batcher._check(1)
        assert full.value.seconds == said
    batcher._waiting.pop()
    batcher._check(1)


def test_guesses_of_a_token_are_counted_and_reading_is_not():
    app = make_app([Stub()], ServerSettings(per_minute=2, token="abc"))

    async def go(http):
        right = {"Authorization": "Bearer abc"}
        read = [await http.get("/v1/models", headers=right) for _ in range(5)]
        return read, [await http.get("/v1/models", headers={"Authorization": f"Bearer {i}"}) for i in range(3)]

    read, guessed = talk(app, go)
    assert {answer.status_code for answer in read} == {200}
    assert [answer.status_code for answer in guessed] == [401, 401, 429]


def test_two_systems_need_names_of_their_own(tmp_path):
    with pytest.raises(ConfigError, match="give their folders different names"):
        make_app([Stub(), Stub()], ServerSettings(votes=tmp_path))


def test_an_encoder_is_not_compared(tmp_path):
    silent = Stub("silent")
    silent.options = frozenset()
    with pytest.raises(ConfigError, match="silent is an encoder and writes no replies to compare; leave out --compare"):
        make_app([Stub(), silent], ServerSettings(votes=tmp_path / "votes"))
    assert not (tmp_path / "votes").exists()
    make_app([silent], ServerSettings())
