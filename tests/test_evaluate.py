import io
import json
import os
import subprocess
import sys
import tarfile

import pytest
from absl.testing import flagsaver

from empax import evaluate

GOOD = {"context": ["I passed the exam!"], "response": "Congratulations, that is great!", "reference": "That is great."}


def write(path, lines):
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines), encoding="utf-8")
    return str(path)


def run(*words, **flags):
    if not evaluate.flags.FLAGS.is_parsed():
        evaluate.flags.FLAGS(["evaluate", "--predictions=none"])
    with flagsaver.flagsaver(**{"bootstrap_samples": 10, "predictions": None, **flags}):
        return evaluate.main(["evaluate", *words])


def test_prints_the_table_and_writes_the_report(tmp_path, capsys):
    rows = [GOOD | {"emotion": "proud", "emotion_prediction": "proud"}, GOOD | {"response": ""}]
    path = write(tmp_path / "mine.jsonl", rows)
    assert run(predictions=path, output=str(tmp_path / "out")) == 0
    printed = capsys.readouterr().out
    assert "emotion_accuracy                      100.00   [100.00, 100.00]" in printed
    assert "rows 2  empty_responses 1" in printed
    assert "bleu_2:moses" not in printed
    stored = json.loads((tmp_path / "out" / "report.json").read_text(encoding="utf-8"))
    assert stored["system"] == "mine"
    assert stored["metrics"]["emotion_accuracy"]["value"] == 100.0
    assert (tmp_path / "out" / "report.html").exists()
    assert (tmp_path / "out" / "report.md").exists()
    assert run(predictions=path, variants=True) == 0
    assert "bleu_2:moses" in capsys.readouterr().out


def test_every_bad_line_is_named_and_nothing_is_scored(tmp_path, capsys):
    path = write(tmp_path / "bad.jsonl", [GOOD, "{oops", GOOD | {"response": 3}, {"context": []}])
    assert run(predictions=path, output=str(tmp_path / "out")) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    for part in ("line 2: not valid JSON", "line 3: 'response' is of type int", "line 4: lacks", "3 bad lines"):
        assert part in printed.err
    assert not (tmp_path / "out").exists()
    assert run(predictions=path, skip_bad_lines=True) == 0
    printed = capsys.readouterr()
    assert "rows 1" in printed.out
    assert "line 3: 'response' is of type int" in printed.err


def test_comparison_is_printed_and_kept(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["evaluate.py", "--predictions=a.jsonl", "--compare=b.jsonl"])
    first = write(tmp_path / "a.jsonl", [GOOD | {"context": [str(i)]} for i in range(8)])
    other = write(tmp_path / "b.jsonl", [GOOD | {"context": [str(i)], "response": "Oh."} for i in reversed(range(8))])
    assert run(predictions=first, compare=other, output=str(tmp_path / "out")) == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("rouge_l") and " p " in line)
    assert "p 0.0909 (randomisation 0.0909)" in line
    stored = json.loads((tmp_path / "out" / "report.json").read_text(encoding="utf-8"))
    assert stored["notes"]["comparison"]["rouge_l"]["difference"] > 0.5
    assert (stored["run"]["predictions"], stored["run"]["compared_with"]) == ("a.jsonl", "b.jsonl")
    assert stored["run"]["command"] == "python -m empax.evaluate --predictions=a.jsonl --compare=b.jsonl"
    unpaired = write(tmp_path / "c.jsonl", [GOOD])
    assert run(predictions=first, compare=unpaired) == 2
    assert "do not pair up by context and reference" in capsys.readouterr().err


def test_ids_alone_are_looked_up_in_the_corpus(tmp_path, capsys):
    table = "conv_id,utterance_idx,context,prompt,speaker_idx,utterance,selfeval,tags\n"
    table += "hit:1_conv:2,1,proud,P,3,I passed the exam!,,\nhit:1_conv:2,2,proud,P,4,That is great.,,\n"
    with tarfile.open(tmp_path / "empatheticdialogues.tar.gz", "w:gz") as tar:
        for name in ("train", "valid", "test"):
            entry = tarfile.TarInfo(f"empatheticdialogues/{name}.csv")
            entry.size = len(table)
            tar.addfile(entry, io.BytesIO(table.encode()))
    path = write(tmp_path / "outputs.jsonl", [{"id": "hit:1_conv:2#2", "response": "That is great."}])
    assert run(predictions=path) == 2
    assert "line 1: lacks 'context', 'reference'" in capsys.readouterr().err
    assert run(predictions=path, data=str(tmp_path)) == 0
    assert "bleu_2                                100.00" in capsys.readouterr().out


@pytest.mark.parametrize("lines", [[], ["", ""]])
def test_nothing_to_score_is_an_error(tmp_path, capsys, lines):
    assert run(predictions=write(tmp_path / "empty.jsonl", lines)) == 2
    assert "no predictions to score" in capsys.readouterr().err
    assert run(predictions=str(tmp_path / "missing.jsonl")) == 2
    assert "there is no file" in capsys.readouterr().err


def test_seeds_are_summed_up(tmp_path, capsys):
    reports = []
    for folder, said in (("run0", "Congratulations, that is great!"), ("run1", "That is great.")):
        (tmp_path / folder).mkdir()
        path = write(tmp_path / folder / "mine.jsonl", [GOOD, GOOD | {"response": said}])
        assert run(predictions=path, output=str(tmp_path / folder)) == 0
        reports.append(str(tmp_path / folder / "report.json"))
    capsys.readouterr()
    assert run(reports[0], reports[0], seeds=True) == 2
    assert "are of the same run" in capsys.readouterr().err
    command = [sys.executable, "-m", "empax.evaluate", "--seeds", *reports, f"--output={tmp_path / 'all'}"]
    found = subprocess.run(command, capture_output=True, text=True, check=True)
    assert found.stdout.startswith("mine, 2 runs\nmetric")
    over = json.loads((tmp_path / "all" / "seeds.json").read_text(encoding="utf-8"))["metrics"]["rouge_l"]
    assert over["low"] < over["values"][0] < over["mean"] < over["values"][1] < over["high"]
    assert over["mean"] == pytest.approx(sum(over["values"]) / 2)


def test_either_predictions_or_seeds(capsys):
    for flags in ({}, {"seeds": True, "predictions": "a.jsonl"}):
        assert run(**flags) == 2
        assert "either --predictions=FILE.jsonl or --seeds" in capsys.readouterr().err
    assert run(seeds=True) == 2
    assert "0 reports given" in capsys.readouterr().err


def test_help_imports_nothing_heavy():
    code = "import empax.evaluate, sys; print([m for m in ('jax', 'numpy', 'nltk', 'flax') if m in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=os.environ)
    assert found.stdout.strip() == "[]"


def test_exit_code_of_the_command(tmp_path):
    path = write(tmp_path / "bad.jsonl", ["nope"])
    command = [sys.executable, "-m", "empax.evaluate", f"--predictions={path}"]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    assert found.returncode == 2
    assert "line 1" in found.stderr


def test_the_linear_judge_judges_a_file_and_the_verdict_comes_first(tmp_path, capsys, monkeypatch):
    from empax.data.sample import load_annotated_pairs
    from empax.pipeline import judging
    from empax.systems.attributes.linear import train_linear

    asked = []
    monkeypatch.setattr(judging, "load_linear", lambda data: asked.append(data) or train_linear(load_annotated_pairs()))
    rows = [GOOD | {"context": [str(i)], "response": ""} for i in range(32)]
    path = write(tmp_path / "mine.jsonl", rows)
    assert run(predictions=path, empathy="linear", variants=True, output=str(tmp_path / "out")) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("Degenerate: 32 of 32 replies are empty")
    for part in ("empathy_f1:linear", "Empathy by the linear judge", "majority level", "Linear judge, held out"):
        assert part in printed
    stored = json.loads((tmp_path / "out" / "report.json").read_text(encoding="utf-8"))
    assert stored["verdict"]["degenerate"]
    assert set(stored["empathy"]) == {"linear", "linear_judge"}
    assert asked == [""]
