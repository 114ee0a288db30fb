"""A run that is watched: curves of its rows, time left, and nothing for who has begun none."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from types import SimpleNamespace

import pytest
from markupsafe import escape

from empax.core.config import ConfigError
from empax.core.files import WorkDir
from empax.core.system import Stage
from empax.serving.web import watch
from empax.serving.web.app import ServerSettings, make_watch_app
from empax.serving.web.watch import Replies, watch_page
from tests.conftest import ROOT
from tests.serving.web.test_app import talk


def test_curves_and_time_left_of_a_run_that_writes(tmp_path):
    (tmp_path / "config.json").write_text(
        json.dumps({"run": ["prepare", "generator", "index"], "generator": {"steps": 100}})
    )
    rows = [{"stage": "generator", "step": step, "split": split, "loss": 5 - step / 10, "seconds": 6.0 * step}
            for step in (10, 20) for split in ("train", "validation")]  # fmt: skip
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows) + '{"stage": "gen')
    app = make_watch_app(tmp_path, ServerSettings())

    def finish(stage):
        (tmp_path / stage).mkdir()
        (tmp_path / stage / "DONE").touch()

    async def go(http):
        finish("prepare")
        first = await http.get("/"), await http.get("/page.css"), await http.post("/", json={})
        later = []
        for stage in ("generator", "index"):
            finish(stage)
            later.append((await http.get("/")).text)
        return *first, *later

    page, sheet, other, indexing, whole = talk(app, go)
    assert page.status_code == sheet.status_code == 200
    assert other.status_code == 405
    assert "generator: step 20 of 100, about 8 min left in this stage." in page.text
    assert page.text.count("<polyline") == 2  # the loss of both splits, and no half a row
    assert "validation" in page.text
    assert "style=" not in page.text  # which the policy forbids
    assert "<p>index is under way; it has logged no step yet.</p>" in indexing
    assert "<p>It has finished; report.html in its folder says how.</p>" in whole
    assert "in this stage" not in indexing + whole


def test_what_may_end_sooner_is_said_to_take_at_most_so_long():
    rows = [{"stage": "generator", "step": 20, "split": "train", "seconds": 120.0}]
    said = "generator: step 20 of at most 100, at most 8 min left in this stage."
    of_own = {"data": {"name": "jsonl"}, "generator": {"steps": 100}}
    for config in ({"generator": {"steps": 100, "patience": 3}}, of_own):
        assert watch.left(config, rows, "generator") == said


def test_replies_change_with_the_best_parameters_of_a_stage_that_goes_on(finished, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    files = WorkDir(run)
    for name in ("DONE", "result.json"):  # the run is still at this stage
        (files.stage("generator") / name).unlink()
    rows = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join(row for row in rows if json.loads(row)["stage"] == "generator"))
    before = sorted((str(path), path.stat().st_mtime_ns) for path in run.rglob("*"))
    replies = Replies(run, 2)
    watch_page(run, replies)
    replies._answering.result()
    page = watch_page(run, replies)
    assert not replies.failed
    step = max(int(path.name) for path in (files.stage("generator") / "best").glob("[0-9]*"))
    assert f"generator, step {step}" in page
    (said,) = replies.said
    told = [json.loads(line)["context"][-1] for line in files.instances("validation").read_text().splitlines()[:2]]
    assert [one for one, _ in said.replies] == told
    assert escape(told[0]) in page
    watch_page(run, replies)
    assert len(replies.said) == 1  # nothing new, nothing done
    assert sorted((str(path), path.stat().st_mtime_ns) for path in run.rglob("*")) == before
    (files.stage("generator") / "best" / str(step)).rename(files.stage("generator") / "best" / str(step + 1))
    watch_page(run, replies)
    replies._answering.result()
    assert "There are no replies: " in watch_page(run, replies) or replies.said[-1].step == step + 1
    off = Replies(run, 0)
    assert "<h2>Replies</h2>" not in watch_page(run, off)
    assert off._answering is None


def test_a_failure_that_nobody_expects_stands_on_the_page(tmp_path, monkeypatch, caplog):
    def answer(*_):
        raise RuntimeError("RESOURCE_EXHAUSTED:\n" + "x" * 999)

    stage = Stage("generator", "train", None, spec=SimpleNamespace(answer=answer))
    monkeypatch.setattr(watch, "read_plan", lambda _: SimpleNamespace(stages={"generator": stage}, seed=0))
    monkeypatch.setattr(watch, "newest_best", lambda _: 10)
    replies = Replies(tmp_path, 2)
    replies.look(["generator"])
    replies._answering.result()
    (tmp_path / "config.json").write_text('{"run": []}')
    assert "There are no replies: RuntimeError: RESOURCE_EXHAUSTED:" in watch_page(tmp_path, replies)
    assert len(replies.failed) < 400
    assert f"RuntimeError in {__file__}" in caplog.text


def test_a_folder_without_a_run_is_named(tmp_path):
    with pytest.raises(ConfigError, match="holds no run; give the work directory of one that has begun"):
        make_watch_app(tmp_path, ServerSettings())


@pytest.mark.slow
def test_a_run_is_watched_from_another_process_while_it_trains(command, shared_tmp, tmp_path):
    run, log = tmp_path / "run", tmp_path / "watch.log"
    environment = {**os.environ, "EMPAX_CACHE_DIR": str(shared_tmp / "cache"), "PYTHONPATH": str(ROOT)}
    longer = [
        f"--config.generator.{name}" for name in ("steps=20000", "eval_every_steps=50", "optimizer.learning_rate=1e-3")
    ]
    training = [sys.executable, "-m", "empax.main", "--config=configs/reg_transformer.py:tiny", f"--workdir={run}"]
    watching = [sys.executable, "-m", "empax.serve", "--watch", str(run), "--replies=2", "--port=0"]
    deadline = time.monotonic() + 600

    def wait(reached):
        while not (found := reached()):
            assert all(process.poll() is None for process in running), log.read_text()
            assert time.monotonic() < deadline
            time.sleep(0.5)
        return found

    with log.open("w") as file:
        running = [subprocess.Popen([*training, *longer], cwd=ROOT, env=environment, stderr=subprocess.DEVNULL)]
        try:
            wait((run / "config.json").exists)
            running.append(subprocess.Popen(watching, cwd=ROOT, env=environment, stderr=file))
            (url,) = wait(lambda: re.findall(r"http://127\.0\.0\.1:[1-9]\d*", log.read_text())[:1])

            def page():
                with urllib.request.urlopen(url, timeout=60) as answer:
                    return answer.read().decode()

            shown = wait(lambda: (text := page()).count("generator, step ") >= 2 and text)
            assert f"process {running[0].pid}" in shown
            assert re.search(r"generator: step \d+ of 20000, about .* left in this stage\.", shown)
            assert "There are no replies" not in shown
            assert shown.count("<polyline")
            for process in reversed(running):
                process.send_signal(signal.SIGINT)
                assert process.wait(120) in (0, 130)
        finally:
            for process in running:
                process.kill()
