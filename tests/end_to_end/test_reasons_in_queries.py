"""REG with ReflectDiffu's annotator: its retriever reads the reasons of a context, by the recipe alone."""

import dataclasses

import numpy as np
import pytest

import empax
from empax.core.files import WorkDir
from empax.core.system import load_encoder_of
from empax.data.store import load_instances
from tests.plans import context_of

pytestmark = pytest.mark.slow


def test_reg_asks_for_exemplars_by_reasons(recipe, tmp_path):
    recipe(tmp_path, config="configs/reg_transformer.py:reasons,tiny")
    files = WorkDir(tmp_path)
    run = context_of(files.root, "index")
    instances = load_instances(run, "test")
    marked = [i for i in instances if i.notes["reasons"]]
    assert marked
    for instance in marked:
        for turn, start, end in instance.notes["reasons"]:
            assert 0 <= start < end <= len(instance.context[turn])
    words = [" ".join(i.context[turn][start:end] for turn, start, end in i.notes["reasons"]) for i in marked]
    bare = [dataclasses.replace(i, context=(text,), notes={}) for i, text in zip(marked, words, strict=True)]
    encoder = load_encoder_of(run, "")
    np.testing.assert_array_equal(encoder.embed_queries(marked), encoder.embed_queries(bare))
    session = empax.Session.load(tmp_path)
    assert [list(map(list, spans)) for spans in session.mark([i.context for i in marked])] == [
        i.notes["reasons"] for i in marked
    ]
    assert session.reply(["My dog died and I miss him."]).exemplars
