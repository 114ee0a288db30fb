"""Folders of tiny models as transformers writes them, and of adapters on them as PEFT does."""

import functools

import pytest

from tests.interop import oracle
from tests.interop.tiny import class_of, tiny


@pytest.fixture(scope="session")
def saved(tmp_path_factory):
    """The folder of a model, by what `tiny` takes."""

    @functools.cache
    def save(name, **changes):
        folder = tmp_path_factory.mktemp(name) / name
        tiny(name, **changes).save_pretrained(folder)
        return folder

    return save


@pytest.fixture
def adapter(saved, tmp_path):
    """Writes an adapter on the model of that name into FOLDER of `tmp_path`; gives PEFT's model."""

    def write(name, folder="adapter", *, base=None, change=lambda model: None, **settings):
        model = class_of(name).from_pretrained(base or saved(name))
        change(model)
        return oracle.lora_of(model, tmp_path / folder, **settings)

    return write
