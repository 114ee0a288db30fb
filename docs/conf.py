"""The site: the Markdown files that a reader wants, all settings, and the API. `make docs` builds it."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tools import settings_page  # noqa: E402

settings_page.main([str(ROOT / "docs" / "generated" / "settings.md")])

project, author, copyright = "empax", "the empax authors", "the empax authors"
root_doc = "docs/index"
include_patterns = [
    "*.md",
    "docs/**",
    "launch/README.md",
    "notebooks/README.md",
    "results/README.md",
    "results/plan/README.md",
    "weights/*/README.md",
]

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
myst_enable_extensions = ["dollarmath", "colon_fence"]
myst_heading_anchors = 4
autodoc_typehints = "signature"
autodoc_member_order = "bysource"
napoleon_use_ivar = True

html_theme = "furo"
html_title = "empax"
html_additional_pages = {"index": "to_start.html"}
templates_path = ["templates"]

PAGES = [
    path.name for path in sorted((ROOT / "empax" / "systems").iterdir()) if (ROOT / f"docs/{path.name}.md").is_file()
]
"""Of systems: `docs/NAME.md` beside `empax/systems/NAME`."""


def setup(app):
    """Puts the pages of systems where docs/index.md has PAGES_OF_SYSTEMS."""
    app.connect(
        "source-read", lambda _, name, text: text.__setitem__(0, text[0].replace("PAGES_OF_SYSTEMS", "\n".join(PAGES)))
    )
