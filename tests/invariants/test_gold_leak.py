"""Gold responses and emotions of the test split are scored, and reach nothing else."""

import shutil

from empax.core.files import WorkDir, read_jsonl, write_jsonl
from empax.core.manifest import describe, files_of, read_sealed, write_sealed


def without_scores(row):
    notes = {k: v for k, v in row["notes"].items() if k not in ("nll", "num_tokens", "reference_attributes")}
    return {**{k: v for k, v in row.items() if k not in ("reference", "emotion")}, "notes": notes}


def reseal(files, stage):
    """Has `DONE` take the stage's files for what it made, and its result for the same as before."""
    write_sealed(
        files.done(stage), {**read_sealed(files.done(stage)), "files": describe(files.root, files_of(files, stage))}
    )


def test_other_references_change_no_response_no_attribute_and_no_exemplar(finished, recipe, tmp_path):
    workdir = tmp_path / "run"
    shutil.copytree(finished, workdir)
    for split in ("test", "validation"):
        path = workdir / "prepare" / f"{split}.jsonl"
        rows = [{**row, "response": f"Purple elephants juggle {i} teapots!"} for i, row in enumerate(read_jsonl(path))]
        # The emotions of the validation split choose the emotion head, those of the test split nothing.
        write_jsonl(path, [{**row, "emotion": "proud"} for row in rows] if split == "test" else rows)
    reseal(WorkDir(workdir), "prepare")
    for stage in ("annotate", "evaluate"):
        (workdir / stage / "DONE").unlink()
    (workdir / "predictions.jsonl").unlink()
    recipe(workdir)
    for split in ("test", "validation"):
        name = f"annotate/{split}.jsonl"
        assert (workdir / name).read_text() == (finished / name).read_text()
        assert all(set(row) == {"id", "context_attributes"} for row in read_jsonl(workdir / name))
    before, after = (list(read_jsonl(folder / "predictions.jsonl")) for folder in (finished, workdir))
    assert [without_scores(row) for row in after] == [without_scores(row) for row in before]
    # ... while the scores of the references did change, so the references were read.
    assert all(row["reference"].startswith("Purple elephants") for row in after)
    assert all(a["notes"]["nll"] != b["notes"]["nll"] for a, b in zip(after, before, strict=True))
