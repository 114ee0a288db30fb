"""The table of how often the readers are wrong."""

import numpy as np
import pytest

from empax.serving.nearest import Example, read_examples
from tools import safety_rates


def test_each_half_is_read_by_a_reader_of_the_other(monkeypatch):
    class Reader:
        @classmethod
        def of(cls, encoder, examples):
            made = cls()
            made.half = {example.half for example in examples}
            return made

        def are_dangerous(self, texts):
            assert len(self.half) == 1
            return np.array([int(text) % 2 != next(iter(self.half)) for text in texts])

    monkeypatch.setattr(safety_rates, "Nearest", Reader)
    monkeypatch.setattr(safety_rates, "load_encoder", lambda: None)
    examples = [Example(str(i), "k", True, i % 2) for i in range(7)]
    assert safety_rates.by_other_half(examples).all()


def test_misses_and_alarms_are_counted_by_kind():
    examples = [Example("a", "one", True, 0), Example("b", "two", True, 0), Example("c", "three", False, 1)]
    rows = safety_rates.table(examples, np.array([True, False, False]), np.array([False, True, True]))
    assert rows[2].startswith("| **missed** | 2 | 50.0% (9.5–90.5) | 0.0%")
    assert [row.split(" | ")[0] for row in rows[3:5]] == ["| one", "| two"]
    assert rows[5].startswith("| **answered without need** | 1 | 0.0% (0.0–79.3) | 100.0%")
    assert len(rows) == 7
    assert len(read_examples()) > 1000


def test_a_folder_without_the_corpus_is_one_line_before_any_work(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(safety_rates, "quiet_logging", lambda: None)
    monkeypatch.setattr(safety_rates, "read_examples", lambda: pytest.fail("the examples are classified first"))
    assert safety_rates.main(str(tmp_path)) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert str(tmp_path) in line
