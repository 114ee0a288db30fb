import json
import re
import sys

import pytest
from absl.testing import flagsaver

from empax import evaluate
from empax.core.files import read_json
from empax.reporting.tables import few_note

GOOD = {"context": ["I passed the exam!"], "response": "Congratulations, that is great!", "reference": "That is great."}


def write(path, lines):
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines), encoding="utf-8")
    return str(path)


def run(*words, **flags):
    if not evaluate.flags.FLAGS.is_parsed():
        evaluate.flags.FLAGS.mark_as_parsed()  # with the defaults; other commands' flags are there as well
    with flagsaver.flagsaver(**{"bootstrap_samples": 10, "predictions": None, **flags}):
        return evaluate.main(["evaluate", *words])


@pytest.fixture
def refused(capsys):
    """What the command says, which does nothing."""

    def refuse(*words, **flags):
        capsys.readouterr()
        assert run(*words, **flags) == 2
        return capsys.readouterr().err

    return refuse


def test_prints_the_table_and_writes_the_report(tmp_path, capsys):
    rows = [GOOD | {"emotion": "proud", "emotion_prediction": "proud"}, GOOD | {"response": ""}]
    path = write(tmp_path / "mine.jsonl", rows)
    assert run(predictions=path, output=str(tmp_path / "out")) == 0
    printed = capsys.readouterr().out
    assert "emotion_accuracy                      100.00   [100.00, 100.00]" in printed
    assert "rows 2  empty_responses 1" in printed
    assert "bleu_2:moses" not in printed
    stored = read_json(tmp_path / "out" / "report.json")
    assert stored["system"] == "mine"
    assert stored["metrics"]["emotion_accuracy"]["value"] == 100.0
    assert (tmp_path / "out" / "report.html").exists()
    assert (tmp_path / "out" / "report.md").exists()
    assert run(predictions=path, variants=True) == 0
    assert "bleu_2:moses" in capsys.readouterr().out


def test_no_control_character_of_a_reply_comes_into_a_report_or_onto_a_terminal(tmp_path, capsys):
    sent = "\x1b[31mred\x1b[0m \0 \x07 \x9b2J"
    rows = [GOOD | {"response": f"{i} {sent}", "context": [f"hi {sent}"], "emotion": "proud"} for i in range(3)]
    path = write(tmp_path / "mine\x1b[1m.jsonl", [*rows, GOOD | {"response": 3, "id": sent}])
    assert run(path, output=str(tmp_path / "out"), skip_bad_lines=True) == 0
    printed = capsys.readouterr()
    texts = [printed.out, printed.err]
    texts += [(tmp_path / "out" / f"report.{kind}").read_text(encoding="utf-8") for kind in ("html", "md", "json")]
    for text in texts:
        assert not any(sign in text for sign in ("\x1b", "\0", "\x07", "\x9b"))
    assert all("\u241b" in text for text in texts[2:4])


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


def test_lines_with_an_id_alone_need_the_corpus_and_no_line_is_named_beyond_the_first(tmp_path, capsys, refused):
    alone = [{"id": f"hit:{i}_conv:{2 * i}#2", "response": "oh", "context": None} for i in range(50)]
    path = write(tmp_path / "outputs.jsonl", alone)
    for flags in ({}, {"skip_bad_lines": True}):
        said = refused(predictions=path, **flags)
        assert f"50 lines of {path} have an id, but no context and no reference: for EmpatheticDialogues, add" in said
        assert "score its predictions.jsonl" in said
        assert "--skip_bad_lines" not in said
        assert said.count("\n") < 25
        assert f"{path}, 30 more bad lines, up to line 50" in said
    assert "2 bad lines in" in refused(predictions=write(tmp_path / "bad.jsonl", ["{oops", *alone[:1]]))
    assert ", and no others." in refused(predictions=str(tmp_path / "bad.jsonl"), skip_bad_lines=True)


def test_comparison_is_printed_and_kept(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["evaluate.py", "--predictions=a.jsonl", "--compare=b.jsonl"])
    first = write(tmp_path / "a.jsonl", [GOOD | {"context": [str(i)]} for i in range(8)])
    other = write(tmp_path / "b.jsonl", [GOOD | {"context": [str(i)], "response": "Oh."} for i in reversed(range(8))])
    assert run(predictions=first, compare=[other], metrics=["rouge_l"], output=str(tmp_path / "out")) == 0
    printed = capsys.readouterr().out
    assert "a - b, 8 rows" in printed
    (line,) = (line.split() for line in printed.splitlines() if line.startswith("rouge_l") and "+" in line)
    assert line[-3:-1] == ["0.0244"] * 2  # 1 / 41: 40 swaps for each test
    assert 0.0244 < float(line[-1]) < 0.08
    better, first_is, other_is = printed.splitlines()[-3:]
    assert other_is == "b: Degenerate: 8 of 8 replies are one and the same."
    assert better == "a (degenerate) against b (degenerate): better on rouge_l (p Holm < 0.05)."
    assert first_is.startswith("a: Degenerate: 8 of 8 replies are one and the same; ")
    stored = read_json(tmp_path / "out" / "report.json")
    (pair,) = stored["notes"]["comparisons"]["pairs"]
    assert set(pair["metrics"]) == {"rouge_l"}
    assert pair["metrics"]["rouge_l"]["difference"] > 0.5
    assert (stored["run"]["predictions"], stored["run"]["compared_with"]) == ("a.jsonl", "b.jsonl")
    assert stored["rows"]["resampled"] == "rows"
    assert stored["run"]["command"] == "python -m empax.evaluate --predictions=a.jsonl --compare=b.jsonl"


@pytest.fixture
def three(tmp_path):
    """Three systems' files; the second is a run's, named by its folder."""
    (tmp_path / "second").mkdir()
    said = {"first.jsonl": "That is great.", "second/predictions.jsonl": "Oh no.", "third.jsonl": "That is it."}
    return [
        write(tmp_path / name, [GOOD | {"context": [str(i)], "response": f"{text} {i}", "id": f"d{i // 2}#{i}"}
                                for i in range(8)])
        for name, text in said.items()
    ]  # fmt: skip


def test_the_last_lines_name_who_is_better_and_every_files_verdict(tmp_path, capsys):
    """A copy of the references is better on everything, one canned reply on nothing: neither passes."""
    objects = ["dog", "cat", "car", "exam", "house", "trip", "boss", "sister", "garden", "phone"]
    made = {
        "sound": lambda it, i: f"{('What of the', 'Poor', 'Tell me about the')[i % 3]} {it}, on day {i}?",
        "copied": lambda it, i: f"oh no , how did you lose the {it} of day {i} ?",
        "canned": lambda it, i: "I am so sorry to hear that.",
    }
    files = []
    for name, answer in made.items():
        rows = [
            GOOD | {"id": f"d{i // 2}#{2 + 2 * (i % 2)}", "context": [f"I lost my {it} on day {i}"],
                    "response": answer(it, i), "reference": f"Oh no, how did you lose the {it} of day {i}?"}
            for i, it in enumerate(objects * 3)
        ]  # fmt: skip
        files.append(write(tmp_path / f"{name}.jsonl", rows))
    out = tmp_path / "out"
    assert run(*files, metrics=["bleu_1", "rouge_l", "length_ratio"], bootstrap_samples=100, output=str(out)) == 0
    last = capsys.readouterr().out.splitlines()[-6:]
    assert last[0] == (
        "sound against copied (degenerate): worse on bleu_1, rouge_l; different in length_ratio (p Holm < 0.05)."
    )
    assert last[1].startswith("sound against canned (degenerate): better on bleu_1, rouge_l; ")
    assert last[3].startswith("sound: No degeneracy found in ")
    assert last[4] == "copied: Degenerate: 30 of 30 replies are copies of references."
    assert last[5].startswith("canned: Degenerate: 30 of 30 replies are one and the same; ")
    stored = read_json(out / "report.json")
    assert {name: one["degenerate"] for name, one in stored["notes"]["comparisons"]["verdicts"].items()} == {
        "sound": False, "copied": True, "canned": True,
    }  # fmt: skip
    for page in ("report.md", "report.html"):
        assert "sound against copied (degenerate): worse on" in (out / page).read_text(encoding="utf-8")
    assert run(files[0]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("sound: No degeneracy found in ")


def test_few_dialogues_are_named(tmp_path, capsys):
    path = write(tmp_path / "few.jsonl", [GOOD | {"id": f"d{i}#2"} for i in range(6)])
    assert run(predictions=path, output=str(tmp_path / "out")) == 0
    for text in (capsys.readouterr().out, (tmp_path / "out" / "report.md").read_text(encoding="utf-8")):
        assert "With 6 dialogues intervals are widened by Student's t; those of " in text.replace("\\", "")


@pytest.mark.parametrize(
    ("unit", "count", "said"),
    [
        ("dialogues", 1, "All rows are of one dialogue, by their ids (DIALOGUE#TURN): intervals have no width, and "),
        ("rows", 1, "There is one row: intervals have no width, and no difference is significant."),
        ("rows", 2, "With 2 rows intervals are widened by Student's t; .* No p is below 0.5000."),
        ("dialogues", 11, "With 11 dialogues intervals .* No p is below 0.0010."),
        ("dialogues", 12, "With 12 dialogues intervals .* are too narrow.$"),
        ("dialogues", 39, "With 39 dialogues intervals"),
        ("dialogues", 40, "$"),
    ],
)
def test_the_note_on_few_rows_depends_on_how_many_are_resampled(unit, count, said):
    rows = {"resampled": unit, "rows": count if unit == "rows" else 99, "dialogues": count}
    assert re.match(said.replace("(", r"\(").replace(")", r"\)"), few_note(rows))


def test_several_files_are_one_table_and_every_pair_is_tested(tmp_path, three, capsys):
    out = tmp_path / "out"
    assert run(*three, metrics=["bleu_1", "distinct_1"], output=str(out)) == 0
    printed = capsys.readouterr().out
    for pair in ("first - second", "first - third", "second - third"):
        assert f"{pair}, 8 rows" in printed
    assert "8 rows of 4 dialogues" in printed
    assert "corrected over 6 tests (3 pairs, 2 metrics)" in printed
    stored = read_json(out / "report.json")["notes"]["comparisons"]
    assert list(stored["systems"]) == ["first", "second", "third"]
    assert [sorted(pair["metrics"]) for pair in stored["pairs"]] == [["bleu_1", "distinct_1"]] * 3
    for page in ("report.md", "report.html"):
        text = (out / page).read_text(encoding="utf-8")
        assert "second - third, 8 rows" in text
        assert "p Holm" in text
    assert run(predictions=three[0], compare=three[1:], metrics=["bleu_1"]) == 0
    printed = capsys.readouterr().out
    assert "first - second" in printed
    assert "first - third" in printed  # a second --compare does not replace the first
    assert "second - third" not in printed


def test_a_metric_of_ones_own_is_scored_and_compared(tmp_path, three, capsys, monkeypatch, refused):
    (tmp_path / "my_metrics.py").write_text(
        "def polite(contexts, responses, references):\n    return [r.startswith('That') for r in responses]\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    assert run(*three, metrics=["bleu_1"], metric=["my_metrics:polite"], output=str(tmp_path / "out")) == 0
    printed = capsys.readouterr().out
    assert "corrected over 6 tests (3 pairs, 2 metrics)" in printed
    stored = read_json(tmp_path / "out" / "report.json")
    assert stored["metrics"]["my_metrics:polite"]["value"] == 1.0
    assert stored["notes"]["comparisons"]["pairs"][0]["metrics"]["my_metrics:polite"]["difference"] == 1.0
    assert run(three[0], metric=["my_metrics:polite"]) == 0
    assert "my_metrics:polite " in capsys.readouterr().out
    assert "my_metrics has no function 'rude'" in refused(three[0], metric=["my_metrics:rude"])
    assert "leave out --peers, or your own metrics" in refused(
        three[0], metric=["my_metrics:polite"], peers=str(tmp_path)
    )


def test_peers_stand_beside_cleaned_text(tmp_path, three, capsys, refused):
    (tmp_path / "peers").mkdir()
    peers = [
        GOOD | {"context": [str(i)], "response": "that is good .", "reference": "that is great ."} for i in range(8)
    ]
    write(tmp_path / "peers" / "moel.jsonl", peers)
    write(tmp_path / "peers" / "stranger.jsonl", [GOOD | {"context": ["other"]}])
    assert run(three[0], peers=str(tmp_path / "peers"), output=str(tmp_path / "out")) == 0
    printed = capsys.readouterr().out
    assert "first - moel, 8 rows" in printed
    assert "stranger is absent: shares 0 of 8 rows" in printed
    stored = read_json(tmp_path / "out" / "report.json")["notes"]["comparisons"]
    assert {name.partition(":")[2] for name in stored["systems"]["moel"]["metrics"]} == {"moel"}
    assert stored["peers"] == ["moel", "stranger"]
    assert "take bleu_2:moel" in refused(three[0], peers=str(tmp_path / "peers"), metrics=["bleu_2"])
    assert run(three[0], peers=str(tmp_path / "peers"), metrics=["bleu_2:moel"]) == 0


def test_flags_that_do_not_go_together_are_refused(three, refused):
    for words, given, says in (
        (three[:2], {"compare": three[2:]}, "2 files and --compare"),
        (three[:1], {"metrics": ["bleu_1"]}, "--metrics says what to compare"),
        (three[:2], {"metrics": ["bleu_9"]}, "bart_score_recall, or a variant in docs/metrics.md"),
        ([three[0], three[0]], {}, "one file is given twice"),
        ([], {}, "name a file to score"),
        ([], {"seeds": True, "predictions": "a.jsonl"}, "leave out --predictions"),
        ([], {"seeds": True}, "0 reports given"),
        (three[:1], {"seeds": True, "compare": three[1:2]}, "leave out --compare"),
        (three[:1], {"seeds": True, "empathy": "linear", "metric": ["a:b"]}, "leave out --metric, --empathy"),
        (three[:1], {"seeds": True, "skip_bad_lines": True}, "leave out --skip_bad_lines"),
    ):
        assert says in refused(*words, **given)


def test_ids_alone_are_looked_up_in_the_corpus(tmp_path, capsys, small_archive, refused):
    path = write(tmp_path / "outputs.jsonl", [{"id": "hit:1_conv:2#2", "response": "That is great."}])
    assert "line 1: lacks 'context', 'reference'" in refused(predictions=path)
    assert run(predictions=path, data=str(small_archive), output=str(tmp_path / "out")) == 0
    assert "bleu_2                                100.00" in capsys.readouterr().out
    assert "random_training" in json.loads((tmp_path / "out" / "report.json").read_text())["controls"]["controls"]
    (tmp_path / "peers").mkdir()
    write(tmp_path / "peers" / "other.jsonl", [{"id": "hit:1_conv:2#2", "response": "Oh."}])
    given = {"predictions": path, "peers": str(tmp_path / "peers")}
    assert run(**given, data=str(small_archive)) == 0
    write(tmp_path / "whole.jsonl", [GOOD])
    assert "add --data=FOLDER" in refused(**given | {"predictions": str(tmp_path / "whole.jsonl")})


def test_paths_may_begin_with_the_sign_of_home(tmp_path, capsys, monkeypatch, refused):
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("mine", "other"):
        write(tmp_path / f"{name}.jsonl", [GOOD, GOOD | {"context": ["2"]}])
    assert run(predictions="~/mine.jsonl", compare=["~/other.jsonl"], output="~/out") == 0
    assert f"to {tmp_path / 'out'}" in capsys.readouterr().out
    assert (tmp_path / "out" / "report.html").exists()
    assert "--data = '~/nothing' holds no EmpatheticDialogues" in refused(predictions="~/mine.jsonl", data="~/nothing")
    assert str(tmp_path / "no-run") in refused(predictions="~/mine.jsonl", empathy="~/no-run")
    assert str(tmp_path / "out" / "report.json") in refused("~/out", "~/out", seeds=True)


def test_an_output_that_takes_no_files_is_told_before_the_predictions_are_read(tmp_path, refused):
    (tmp_path / "taken").touch()
    for words, flags in (((), {"predictions": "none.jsonl"}), (("a", "b"), {"seeds": True})):
        said = refused(*words, output=str(tmp_path / "taken"), **flags)
        assert said == f"error: --output={tmp_path / 'taken'} is not a folder; name a folder, or a new path.\n"


def test_the_report_of_a_run_is_not_overwritten(tmp_path, refused):
    path = write(tmp_path / "predictions.jsonl", [GOOD])
    (tmp_path / "run.json").write_text("{}")
    assert "whose own report would be lost; name another folder." in refused(path, output=str(tmp_path))
    assert run(path, output=str(tmp_path / "scores")) == 0
    seeds = [write(tmp_path / f"{n}.jsonl", [GOOD | {"response": f"{n}"}]) for n in "ab"]
    assert "own report" not in refused(*seeds, seeds=True, output=str(tmp_path))  # there would be no report


def test_the_report_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    path = write(tmp_path / "mine.jsonl", [GOOD])
    monkeypatch.setattr("empax.reporting.page.html", lambda report: "half a pair: \ud83d")
    with pytest.raises(UnicodeEncodeError):
        run(predictions=path, output=str(tmp_path / "out"))
    assert not list(tmp_path.glob("out/*"))


def test_a_perplexity_beyond_all_numbers_is_said(tmp_path, refused):
    path = write(tmp_path / "words.jsonl", [GOOD | {"id": "long", "nll": 69_000.0, "num_tokens": 100}])
    said = refused(predictions=path)
    assert "perplexity_per_word" in said
    assert "690 nats, is that of prediction 1 (long)" in said


def test_wrong_files_and_folders_fail_before_any_work(tmp_path, three, monkeypatch, refused):
    from empax.pipeline import judging
    from empax.reporting import score_file

    for module, work in ((judging, "find_jury"), (score_file, "score")):
        monkeypatch.setattr(module, work, lambda *_, **__: pytest.fail("this takes minutes"))
    short = write(tmp_path / "short.jsonl", [GOOD])
    (tmp_path / "no BART").mkdir()
    for words, flags, said in (
        ([three[0], short], {}, "do not pair up by context and reference"),
        (three[:1], {"peers": str(tmp_path / "nobody")}, "there is no folder with *.jsonl"),
        (three[:1], {"bart_score": str(tmp_path / "no BART")}, "no BART"),
    ):
        assert said in refused(*words, empathy="linear", **flags)


def test_reports_of_runs_scored_again_are_summed_up_as_seeds(tmp_path, capsys):
    """By the system and seed of each run's config; what does not belong together: tests/reporting/test_seeds.py."""
    for folder, seed in (("a", 0), ("b", 1)):
        (tmp_path / folder).mkdir()
        path = write(tmp_path / folder / "predictions.jsonl", [GOOD | {"response": f"Great, {folder}."}, GOOD])
        (tmp_path / folder / "config.json").write_text(json.dumps({"system": "emprl", "seed": seed}))
        assert run(predictions=path, output=str(tmp_path / folder / "scored")) == 0
    capsys.readouterr()
    reports = [str(tmp_path / folder / "scored" / "report.json") for folder in "ab"]
    assert run(*reports, seeds=True, output=str(tmp_path / "all")) == 0
    assert capsys.readouterr().out.startswith("emprl, 2 runs\n")
    assert read_json(tmp_path / "all" / "seeds.json")["metrics"]["rouge_l"]["mean"] > 0


@pytest.mark.parametrize("lines", [[], ["", ""]])
def test_nothing_to_score_is_an_error(tmp_path, lines, refused):
    assert "no predictions to score" in refused(predictions=write(tmp_path / "empty.jsonl", lines))
    assert "there is no file" in refused(predictions=str(tmp_path / "missing.jsonl"))


def test_the_linear_judge_judges_a_file_and_the_verdict_comes_last(tmp_path, capsys, monkeypatch, refused, no_data_dir):
    from empax.data.sample import load_annotated_pairs
    from empax.parts.attributes.linear import train_linear
    from empax.pipeline import judging

    rows = [GOOD | {"context": [str(i)], "response": ""} for i in range(32)]
    path = write(tmp_path / "mine.jsonl", rows)
    assert "set --data or EMPAX_DATA_DIR to the" in refused(predictions=path, empathy="linear")
    asked, judge = [], train_linear(load_annotated_pairs())
    monkeypatch.setattr(judging, "load_linear", lambda data, **_: asked.append(data) or judge)
    assert run(predictions=path, empathy="linear", variants=True, output=str(tmp_path / "out")) == 0
    printed = capsys.readouterr().out
    assert printed.splitlines()[-1] == "mine: Degenerate: 32 of 32 replies are empty."
    for part in ("empathy_f1:linear", "Empathy by the linear judge", "majority level", "Linear judge, held out"):
        assert part in printed
    stored = read_json(tmp_path / "out" / "report.json")
    assert stored["verdict"]["degenerate"]
    assert set(stored["empathy"]) == {"linear", "linear_judge"}
    assert run(predictions=path, empathy="linear", data=str(tmp_path)) == 0  # a folder without EmpatheticDialogues
    assert asked == ["", str(tmp_path)]
