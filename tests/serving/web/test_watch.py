"""A run that is watched: curves of its rows, time left, and nothing for who has begun none."""

import asyncio
import json

import pytest

from empax.core.config import ConfigError
from empax.serving.web.app import ServerSettings, make_watch_app
from empax.serving.web.watch import left
from tests.serving.web.test_app import client


def test_curves_and_time_left_of_a_run_that_writes(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"generator": {"steps": 100}}))
    rows = [{"stage": "generator", "step": step, "split": split, "loss": 5 - step / 10, "seconds": 6.0 * step}
            for step in (10, 20) for split in ("train", "validation")]  # fmt: skip
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows) + '{"stage": "gen')
    app = make_watch_app(tmp_path, ServerSettings())

    async def go():
        async with client(app) as http:
            return await http.get("/"), await http.get("/page.css"), await http.post("/", json={})

    page, sheet, other = asyncio.run(go())
    assert page.status_code == sheet.status_code == 200
    assert other.status_code == 405
    assert "generator: step 20 of 100, about 8 min left in this stage." in page.text
    assert page.text.count("<polyline") == 2  # the loss of both splits, and no half a row
    assert "validation" in page.text
    assert "style=" not in page.text  # which the policy forbids
    assert left({}, []) == "No step is logged yet."


def test_a_folder_without_a_run_is_named(tmp_path):
    with pytest.raises(ConfigError, match="holds no run; give the work directory of one that has begun"):
        make_watch_app(tmp_path, ServerSettings())
