"""Embedding by Beam's direct runner: the vectors of one process, in order, and what a failed pipeline leaves."""

import json

import numpy as np
import pytest

from empax.core.files import DataError, write_jsonl
from empax.core.types import Instance
from empax.data.dialogues import instance_to_row
from empax.retrieval.beam import EmbedPart, Part, embed_file, parts_of

INSTANCES = [Instance(f"d{i}#2", (f"I lost {i} dogs — again",), f"oh no {i}", "sad") for i in range(23)]


class Encoder:
    """Vectors that tell what was embedded; stands in for CorpusEncoder."""

    def embed_keys(self, instances):
        return np.array([[len(i.context[0]), float(i.response.split()[-1])] for i in instances], np.float32)


class Broken:
    def embed_keys(self, instances):
        raise ValueError("out of memory")


@pytest.fixture
def corpus(tmp_path):
    path = tmp_path / "train.jsonl"
    write_jsonl(path, [instance_to_row(instance) for instance in INSTANCES])
    return path


def test_parts_are_lines_and_bytes(corpus):
    parts = parts_of(corpus, 10)
    assert [(part.before, part.rows) for part in parts] == [(0, 10), (10, 10), (20, 3)]
    with corpus.open("rb") as file:
        file.seek(parts[2].offset)
        assert json.loads(file.readline())["id"] == "d20#2"


def test_vectors_are_those_of_one_process_in_order(corpus, tmp_path):
    found = embed_file(corpus, Encoder, tmp_path / "out", options=("--runner=DirectRunner",), rows_per_part=5)
    np.testing.assert_array_equal(found, Encoder().embed_keys(INSTANCES))
    assert isinstance(found, np.memmap)
    again = embed_file(corpus, Broken, tmp_path / "out", rows_per_part=5)  # nothing is left to do
    np.testing.assert_array_equal(again, found)


def test_a_pipeline_that_failed_goes_on(corpus, tmp_path):
    folder = tmp_path / "out"
    with pytest.raises(Exception, match="out of memory"):
        embed_file(corpus, Broken, folder, rows_per_part=5)
    assert not (folder / "embeddings.npy").exists()
    kept = Part(5, 0, 5).file(folder)
    kept.parent.mkdir(exist_ok=True)
    np.save(kept, np.full((5, 2), 7.0, np.float32))
    found = embed_file(corpus, Encoder, folder, rows_per_part=5)
    assert (found[5:10] == 7.0).all()
    np.testing.assert_array_equal(found[:5], Encoder().embed_keys(INSTANCES[:5]))


def test_what_does_not_fit_is_named(corpus, tmp_path):
    empty = tmp_path / "empty.jsonl"
    empty.write_text("")
    with pytest.raises(DataError, match="has no lines"):
        embed_file(empty, Encoder, tmp_path / "empty")
    folder = tmp_path / "out"
    folder.mkdir()
    np.save(Part(0, 0, 5).file(folder), np.zeros((4, 2), np.float32))
    with pytest.raises(DataError, match=r"part-000000.npy holds \(4, 2\), must be \(5, 2\); delete it"):
        embed_file(corpus, Encoder, folder, rows_per_part=5)
    with corpus.open("a") as file:
        file.write("{\n")
    embed = EmbedPart(corpus, Encoder, folder)
    embed.setup()
    with pytest.raises(DataError, match=r"train\.jsonl, line 24: not valid JSON"):
        next(embed.process(parts_of(corpus, 10)[2]))
