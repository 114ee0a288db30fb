"""The site is built from the documents and the settings without a warning."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tools.settings_page import page

ROOT = Path(__file__).resolve().parents[2]


def test_every_key_of_a_config_is_described_with_its_default():
    text = page()
    rows = [re.split(r" \| ", line.strip("| ")) for line in text.splitlines() if line.startswith("| `")]
    assert len(rows) > 300
    assert not [row[0] for row in rows if len(row) < 4]
    assert re.search(r"\| `rank` \| `int` \| `8` \| r, from 1", text)
    assert re.search(r"### `config\.\w+\.lora`", text)
    assert "### `task = 'reg.joint'`" in text
    assert "mesh axis that it is split over" in text  # a description of several lines


@pytest.mark.slow
def test_the_site_is_built_without_a_warning(tmp_path):
    flags = ["-q", "-W", "--keep-going", "-c", "docs", "-b", "html", "-d", str(tmp_path / "read")]
    done = subprocess.run(
        [sys.executable, "-m", "sphinx", *flags, ".", str(tmp_path / "site")], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "docs/index.html" in (tmp_path / "site" / "index.html").read_text(encoding="utf-8")
    pages = {path.relative_to(tmp_path / "site").as_posix() for path in (tmp_path / "site").rglob("*.html")}
    assert {"README.html", "docs/api.html", "docs/results/reg.html", "docs/generated/settings.html"} <= pages
    start = (tmp_path / "site" / "docs" / "index.html").read_text(encoding="utf-8")
    assert not re.findall(r'(?:src|href)="(?:https?:)?//', re.sub(r"<a [^>]*>", "", start))  # nothing from other hosts
