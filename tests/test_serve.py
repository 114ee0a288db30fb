"""The command that serves: what it refuses before it loads anything, and how it ends."""

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


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["one", "two"], "error: name one model or run, such as: empax serve empathetic-t5-small"),
        (
            ["x", "--host=0.0.0.0"],
            "error: --host=0.0.0.0 is open to others; set EMPAX_TOKEN, or take --host=127",
        ),
        (["no/such/model"], "error: "),
        (
            ["x", "--watch", "--compare=y"],
            "error: --watch shows how a run trains, and --compare would do nothing; leave",
        ),
        (["x", "--watch", "--rate=5", "--log_texts"], "error: --watch shows how a run trains, and --rate, --log_texts"),
        (["x", "--votes=there"], "error: without --compare nobody votes, and --votes would do nothing; leave it out."),
        (["x", "--compare=./x"], "error: both systems are called x; give them folders with names of their own."),
        (["x", "--replies=1"], "error: without --watch nothing trains, and --replies would do nothing; leave it out."),
    ],
)
def test_what_cannot_be_served_is_one_line(words, said, command):
    ran = command("-m", "empax", "serve", *words)
    assert ran.returncode == 2
    (line,) = ran.stderr.splitlines()
    assert line.startswith(said)


def test_a_reply_of_a_run_has_the_limit_of_the_run(command, tmp_path):
    (tmp_path / "run.json").write_text("{}")
    ran = command("-m", "empax", "serve", str(tmp_path), "--max_tokens=10")
    assert ran.returncode == 2
    assert ran.stderr == "error: a run has its own limit, and --max_tokens would do nothing; leave it out.\n"


def test_votes_on_other_systems_are_named_before_anything_is_loaded(command, tmp_path):
    (tmp_path / "key.json").write_text('{"systems": ["x", "z"]}')
    ran = command("-m", "empax", "serve", "x", "--compare=y", f"--votes={tmp_path}")
    assert ran.returncode == 2
    assert ran.stderr == f"error: {tmp_path} has votes on x and z; give --votes another folder.\n"
    assert [path.name for path in tmp_path.iterdir()] == ["key.json"]


def test_a_port_in_use_is_named_before_anything_is_loaded(command):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        ran = command("-m", "empax", "serve", "empathetic-t5-small", f"--port={port}")
    assert ran.returncode == 2
    (line,) = ran.stderr.splitlines()
    assert line.startswith(f"error: --host=127.0.0.1 --port={port}: Address already in use; take another host or port")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_batch_that_nobody_waits_for_does_not_hold_it_up(number):
    said = {"model": "stub", "messages": [{"role": "user", "content": "long"}]}
    with subprocess.Popen([sys.executable, "-c", BUSY], cwd=ROOT, stderr=subprocess.PIPE, text=True) as process:
        try:
            (url,) = re.findall(r"http\S+", process.stderr.readline())
            transport = httpx.HTTPTransport(retries=8)  # it listens a moment later
            with httpx.Client(base_url=url, transport=transport) as client, pytest.raises(httpx.ReadTimeout):
                client.post("/v1/chat/completions", json=said, timeout=httpx.Timeout(20, read=1))
            process.send_signal(number)
            assert process.wait(20) in (0, -signal.SIGTERM)
        finally:
            process.kill()
