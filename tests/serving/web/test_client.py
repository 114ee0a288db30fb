"""The official client over loopback."""

import threading
import time

import openai
import pytest

from tests.serving.web.stub import Stub


def test_openais_client_chats_streams_embeds_and_gets_its_own_errors(served):
    _, url = served(Stub(), token="abc")
    with openai.OpenAI(base_url=f"{url}/v1", api_key="abc", max_retries=0) as client:
        asked = {"model": "stub", "messages": [{"role": "user", "content": "I lost my keys."}]}
        reply = client.chat.completions.create(**asked, temperature=0.7, max_completion_tokens=20, seed=1)
        assert reply.choices[0].message.content == "stub heard I lost my keys."
        assert reply.usage.total_tokens == 5
        parts = list(client.chat.completions.create(**asked, stream=True))
        assert "".join(part.choices[0].delta.content or "" for part in parts) == "stub heard I lost my keys."
        assert client.embeddings.create(model="stub", input=["ab"]).data[0].embedding == [2.0, 0.5]
        assert [model.id for model in client.models.list()] == ["stub"]
        with pytest.raises(openai.BadRequestError) as refused:
            client.chat.completions.create(**asked, presence_penalty=1)
        assert refused.value.param == "presence_penalty"
        with pytest.raises(openai.NotFoundError):
            client.chat.completions.create(**{**asked, "model": "gpt"})
    with (
        openai.OpenAI(base_url=f"{url}/v1", api_key="abd", max_retries=0) as stranger,
        pytest.raises(openai.AuthenticationError),
    ):
        stranger.models.list()


def test_a_reply_comes_while_it_is_written_and_is_given_up_when_nobody_reads_it(served):
    stub = Stub()
    _, url = served(stub)
    stub.going_on.clear()
    asked = {"model": "stub", "messages": [{"role": "user", "content": "I lost my keys."}], "stream": True}
    with openai.OpenAI(base_url=f"{url}/v1", api_key="-", max_retries=0) as client:
        reading = client.chat.completions.create(**asked)
        pieces = (part.choices[0].delta.content for part in reading)
        assert [next(pieces) for _ in range(3)] == ["", "stub", " heard"]  # and the stub waits
        stub.going_on.set()
        assert "".join(piece or "" for piece in pieces) == " I lost my keys."
        stub.going_on.clear()
        leaving = client.chat.completions.create(**asked)
        next(iter(leaving))
        leaving.response.close()
        time.sleep(0.5)
        stub.going_on.set()
        assert stub.given_up.wait(10)
        assert client.models.list().data  # and the server goes on


def test_a_server_that_is_told_to_stop_finishes_what_runs(served):
    stub = Stub()
    server, url = served(stub)
    stub.free.clear()
    said = []

    def ask():
        with openai.OpenAI(base_url=f"{url}/v1", api_key="-", max_retries=0) as client:
            asked = {"model": "stub", "messages": [{"role": "user", "content": "wait"}]}
            said.append(client.chat.completions.create(**asked).choices[0].message.content)

    asking = threading.Thread(target=ask)
    asking.start()
    assert stub.busy.wait(20)
    server.should_exit = True  # what SIGTERM does
    time.sleep(0.3)
    stub.free.set()
    asking.join(20)
    assert said == ["stub heard wait"]
