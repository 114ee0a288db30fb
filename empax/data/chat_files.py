"""Where models keep their chat templates: a file of its own, or a field of a JSON file; one, or several by name."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from empax.core.files import DataError
from empax.data.model_files import check_whole, is_listed, read_model_json

log = logging.getLogger("empax")

TEMPLATE, MORE, FIELD = "chat_template.jinja", "additional_chat_templates", "chat_template"

_DEFAULT = "default"
_JSON_FILES = ("tokenizer_config.json", "chat_template.json")
"""With a field for templates; the second is that of processors, before they had a file of its own."""


def read_chat_template(folder: Path) -> str | None:
    """The template of a folder, of several the one named "default"; None if there is none.

    Files of their own count before fields of JSON files, as transformers has it.

    Raises:
      DataError: a file is broken, or a field holds no templates.
    """
    templates = {_DEFAULT: folder / TEMPLATE} if is_listed(folder / TEMPLATE) else {}
    templates |= {file.stem: file for file in sorted((folder / MORE).glob("*.jinja"))}
    if templates:
        return default_template({name: _text(file) for name, file in templates.items()}, str(folder))
    for name in _JSON_FILES:
        fields = read_model_json(folder / name) if is_listed(folder / name) else {}
        if fields.get(FIELD) is not None:
            return default_template(fields[FIELD], str(folder / name))
    return None


def default_template(found: Any, where: str) -> str | None:
    """What stands for a chat among templates: a text; or several, as a mapping or a list of objects with a name.

    Several without one named "default" are none: no dialogue says which of them it wants, and a warning names them.

    Raises:
      DataError: `found` is no such thing; `where` says of which file.
    """
    if isinstance(found, str):
        return found
    if isinstance(found, list) and all(isinstance(one, Mapping) for one in found):
        found = {one.get("name"): one.get("template") for one in found}
    if not isinstance(found, Mapping) or not all(isinstance(text, str) for pair in found.items() for text in pair):
        raise DataError(
            f"{where}: {FIELD} must be a text, a list of objects with a name and a template, or an object of templates "
            "by name; correct it, or fetch the model again."
        )
    if found and _DEFAULT not in found:
        log.warning(
            "%s has chat templates for %s alone; texts are read without a template. To frame them, name one of these "
            "%r.",
            where,
            ", ".join(map(repr, found)),
            _DEFAULT,
        )
    return found.get(_DEFAULT)


def _text(file: Path) -> str:
    check_whole(file)
    try:
        return file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"{file} is not UTF-8 ({error}); save it so, or fetch the model again.") from error
