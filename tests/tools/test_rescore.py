"""Committed outputs are scored again: which rows, and when."""

import pytest

from empax.core.config import ConfigError
from empax.core.files import DataError, read_json, write_json, write_jsonl, write_text
from empax.core.types import Instance
from empax.data.empathetic_dialogues import Corpus
from empax.data.epitome import FILES
from empax.evaluation.scoring import ScoringSettings
from empax.pipeline.judging import Jury
from tools import document
from tools import rescore as command
from tools.rescore import Source, rescore

CORPUS = {
    f"hit:{i}_conv:{i}#2": Instance(
        id=f"hit:{i}_conv:{i}#2", context=(f"I lost my {i} keys .",), response=f"oh no , {i} keys", emotion="sad"
    )
    for i in range(12)
}


def make_source(inputs="1"):
    settings = ScoringSettings(bootstrap_samples=20, variants=("bleu_2:moel",))
    return Source(Corpus("a corpus", CORPUS, list(CORPUS.values())), Jury(), settings, inputs)


@pytest.fixture
def results(tmp_path):
    for reply in ("oh", "keys"):
        outputs = [{"id": name, "response": f"{reply} {i}"} for i, name in enumerate(CORPUS)]
        write_jsonl(tmp_path / "runs" / "sys" / reply / "0" / "outputs.jsonl.gz", outputs)
    systems = ["sys/oh/0", "sys/keys/0"]
    group = {"systems": systems, "pairs": [systems], "metrics": ["bleu_1", "distinct_1"]}
    plan = {"skip_rows": {"sys": 4}, "groups": {"two": group}}
    write_json(tmp_path / "rescore.json", plan)
    return tmp_path


def test_scores_are_of_the_rows_that_are_not_left_out(results):
    rescore(results, make_source())
    found = read_json(results / "runs" / "sys" / "oh" / "0" / "scores.json")
    assert (found["first_row"], found["rows"]["rows"]) == (5, 8)
    assert {"canned", "random_training", "same_emotion"} <= set(found["controls"]["controls"])
    assert "bleu_2:moel" in found["variants"]
    pair = read_json(results / "comparisons.json")["two"]["pairs"][0]
    assert pair["rows"] == 8
    assert set(pair["metrics"]) == {"bleu_1", "distinct_1"}


def test_only_what_is_stale_is_scored_again(results):
    rescore(results, make_source())
    path = results / "runs" / "sys" / "oh" / "0" / "scores.json"
    write_json(path, {**read_json(path), "mark": True})
    rescore(results, make_source())
    assert read_json(path).get("mark")
    rescore(results, make_source(inputs="2"))
    assert "mark" not in read_json(path)


def test_scores_depend_on_the_posts_that_the_judge_is_trained_on(tmp_path):
    hashes = set()
    for posts in ("a", "b", "b"):
        for name in FILES.values():
            write_text(tmp_path / name, posts)
        hashes.add(command._hash_inputs(str(tmp_path)))
    assert len(hashes) == 2


def test_released_outputs_are_compared_where_their_folder_is_given(results):
    plan = read_json(results / "rescore.json")
    plan["groups"]["two"] |= {"pairs": [], "peers": ["p"]}
    write_json(results / "rescore.json", plan)
    peers = [{"id": i.id, "context": i.context, "reference": i.response, "response": "yes"} for i in CORPUS.values()]
    write_jsonl(results / "peers" / "p.jsonl", peers)
    with pytest.raises(ConfigError, match="give their folder with --peers"):
        rescore(results, make_source())
    with pytest.raises(DataError, match=r"make it with python -m tools\.rescore"):
        document._read(results / "comparisons.json")
    rescore(results, make_source(), results / "peers")
    assert document._read(results / "comparisons.json")["two"]["pairs"][0]["second"] == "p (released)"
    with (results / "peers" / "p.jsonl").open("a", encoding="utf-8") as file:
        file.write("no JSON\n")
    with pytest.raises(DataError, match=r"p\.jsonl, line 13: not valid JSON.* \(bad lines: 1\)\. Correct"):
        rescore(results, make_source(), results / "peers")
