"""The command that serves: what it refuses before it loads anything, and how it ends."""

import json
import re
import signal
import socket
import subprocess
import sys

import httpx
import pytest

from tests.conftest import ROOT

BUSY = """
import time
from absl import flags
from empax import serve
from empax.serving.web import batcher
from empax.serving.web.app import ServerSettings, make_app
from tests.serving.web.stub import Stub

flags.FLAGS(["serve", "--port=0"])
batcher.LEFT_SECONDS = 0.2
stub = Stub()
stub.free.wait = lambda _: time.sleep(600)
serve.serve(make_app([stub], ServerSettings()), serve._place())
"""

TWO = """
from absl import flags
from empax import serve

flags.FLAGS(["serve", "--port=0"])
first = serve._place()
flags.FLAGS.port = first.getsockname()[1]
serve._place()
"""


def test_what_cannot_be_served_is_one_line_before_anything_is_loaded(command_lines, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.json").write_text("{}")
    votes = tmp_path / "votes"
    votes.mkdir()
    key = {"study": "s", "settings": {"form": "ab"}, "systems": ["x", "z"], "items": []}
    (votes / "key.json").write_text(json.dumps(key))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        cases = [
            (["one", "two"], "name one model or run, such as: empax serve empathetic-t5-small"),
            (["x", "--host=0.0.0.0"], "--host=0.0.0.0 is open to others; set EMPAX_TOKEN, or use --host=127.0.0.1."),
            (["no/such/model"], "'no/such/model'"),
            (["x", "--watch", "--compare=y"], "--watch shows how a run trains, and --compare would do nothing; leave"),
            (["x", "--watch", "--rate=5", "--log_texts"], "--watch shows how a run trains, and --rate, --log_texts "),
            (["x", "--votes=there"], "without --compare nobody votes, and --votes would do nothing; leave it out."),
            (["x", "--compare=./x"], "both systems are called x; give their folders different names."),
            (["x", "--replies=1"], "without --watch nothing trains, and --replies would do nothing; leave it out."),
            (
                [str(tmp_path / "run"), "--max_tokens=10"],
                "a run has its own limit, and --max_tokens would do nothing; ",
            ),
            (["x", "--compare=y", f"--votes={votes}"], f"{votes} has votes on x and z; give --votes another folder."),
            (["x", f"--port={port}"], f"--host=127.0.0.1 --port={port}: Address already in use; use another host or"),
        ]
        found = command_lines("empax.serve", [words for words, _ in cases])
    for (words, message), (code, said) in zip(cases, found, strict=True):
        assert code == 2, words
        (line,) = said.splitlines()
        assert line.startswith(f"error: {message}"), words
    assert [path.name for path in votes.iterdir()] == ["key.json"]


def test_a_port_is_taken_before_anything_is_served():
    result = subprocess.run([sys.executable, "-c", TWO], cwd=ROOT, capture_output=True, text=True, check=False)
    assert "Address already in use; use another host or port" in result.stderr.splitlines()[-1]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_batch_that_nobody_waits_for_does_not_hold_it_up(number):
    said = {"model": "stub", "messages": [{"role": "user", "content": "long"}]}
    with subprocess.Popen([sys.executable, "-c", BUSY], cwd=ROOT, stderr=subprocess.PIPE, text=True) as process:
        try:
            (url,) = re.findall(r"http\S+", process.stderr.readline())
            with httpx.Client(base_url=url) as client:
                assert client.get("/healthz", timeout=60).is_success  # the port is taken before anybody answers
                with pytest.raises(httpx.ReadTimeout):
                    client.post("/v1/chat/completions", json=said, timeout=httpx.Timeout(20, read=1))
            process.send_signal(number)
            assert process.wait(20) in (0, -signal.SIGTERM)
        finally:
            process.kill()
