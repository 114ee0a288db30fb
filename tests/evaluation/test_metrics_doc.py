import re
from pathlib import Path

from empax.evaluation.normalisation import NORMALISATIONS
from empax.evaluation.scoring import METRICS, VARIANTS


def test_the_page_of_metrics_names_every_metric_and_normalisation():
    page = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`([\w:]+)`", page.replace("bleu_N", "bleu_2")))
    for name in METRICS:
        assert name in named or name in ("bleu_2", "bleu_3"), name  # "bleu_1 to bleu_4"
    for name in VARIANTS:
        variant = name.partition(":")[2]
        assert {name, f":{variant}", f"bleu_2:{variant}"} & named, name
    assert set(NORMALISATIONS) <= named
