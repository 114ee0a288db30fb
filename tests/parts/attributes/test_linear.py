import numpy as np
import pytest
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression

from empax.core.config import ConfigError
from empax.core.types import LEVELS, MECHANISMS
from empax.data.epitome import find_epitome, load_epitome, split_by_seeker
from empax.data.sample import load_annotated_pairs
from empax.parts.attributes import linear


@pytest.fixture(scope="module")
def pairs():
    return load_annotated_pairs()


@pytest.fixture(scope="module")
def judge(pairs):
    return linear.train_linear(pairs)


def test_it_gives_every_reply_a_level_of_each_mechanism(judge, pairs):
    replies = [pair.response_post for pair in pairs]
    found = judge(replies)
    assert found.shape == (len(pairs), 3, 3)
    np.testing.assert_allclose(found.sum(axis=-1), 1.0)
    levels = judge.levels(replies)
    assert [row["exploration"] for row in levels] == [LEVELS[i] for i in found[:, 2].argmax(axis=-1)]
    hits = np.mean(
        [[row[name] == pair.levels[name] for name in MECHANISMS] for row, pair in zip(levels, pairs, strict=True)]
    )
    assert hits > 0.9  # of what it was trained on
    assert judge([]).shape == (0, 3, 3)
    assert judge.levels([""])[0].keys() == set(MECHANISMS)


def test_it_reads_question_marks_and_no_context(judge):
    asked, told = judge(["What happened then?", "Nothing happened then."])
    assert asked[2, 0] < told[2, 0]


def test_the_same_pairs_give_the_same_judge(judge, pairs):
    again = linear.train_linear(pairs)
    assert again.held_out == judge.held_out
    np.testing.assert_array_equal(again(["That is sad."]), judge(["That is sad."]))


@pytest.mark.oracle
def test_probabilities_are_those_of_plain_scikit_learn_with_another_solver(judge, pairs):
    words = TfidfVectorizer(ngram_range=(1, 2), min_df=2, sublinear_tf=True, token_pattern=r"\w+|\?")
    vectors = words.fit_transform([pair.response_post for pair in pairs])
    labels = [LEVELS.index(pair.levels["interpretation"]) for pair in pairs]
    oracle = LogisticRegression(C=10.0, max_iter=5000, tol=1e-8).fit(vectors, labels)
    asked = ["I know how hard it is, I lost my dog too.", "What did you do?"]
    np.testing.assert_allclose(judge(asked)[:, 1], oracle.predict_proba(words.transform(asked)), atol=2e-3)


def test_quality_is_measured_on_posts_that_it_has_not_seen(judge, pairs, monkeypatch):
    seen = []
    fitted = linear._fitted
    monkeypatch.setattr(linear, "_fitted", lambda chosen: seen.append(chosen) or fitted(chosen))
    found = linear.train_linear(pairs, holdout=0.3, seed=4).held_out
    train, rest = split_by_seeker(pairs, holdout=0.3, seed=4)
    assert [len(chosen) for chosen in seen] == [len(train), len(pairs)]
    assert {one["pairs"] for one in found.values()} == {len(rest)}
    assert found != judge.held_out
    assert all(set(one) == {"weighted_f1", "macro_f1", "kappa", "pairs"} for one in found.values())


def test_a_level_that_no_pair_has_gets_nothing(pairs):
    some = [pair for pair in pairs if pair.levels["exploration"] != "mid"]
    found = linear.train_linear(some)(["Why?", "Good."])
    assert found[:, 2, 1].tolist() == [0.0, 0.0]


def test_without_epitome_it_says_so(tmp_path, no_data_dir):
    for given in ([str(tmp_path)], []):
        with pytest.raises(ConfigError, match="EPITOME"):
            linear.load_linear(*given)


@pytest.mark.real_data
@pytest.mark.slow
def test_held_out_quality_on_epitome(real_data):
    judge = linear.load_linear(str(real_data))
    found = {name: one["weighted_f1"] for name, one in judge.held_out.items()}
    assert found == pytest.approx({"emotional_reaction": 74.2, "interpretation": 78.5, "exploration": 88.9}, abs=1.0)
    assert linear.load_linear(str(real_data)) is judge
    assert len(load_epitome(find_epitome(real_data))) == 3084
