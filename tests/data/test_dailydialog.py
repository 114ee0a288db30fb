"""DailyDialog: where it lies, which turns are answered, and what is wrong with a file."""

import pytest

from empax.core.config import ConfigError
from empax.core.files import DataError
from empax.core.types import Instance, Utterance
from empax.data.dailydialog import find_dailydialog, load_dialogues, load_instances
from empax.data.english import as_typed, with_capitals, written

LINES = [
    "Some weed ? __eou__ Oh , umm , no thanks . __eou__ I ' ll wait , don't worry . __eou__ Let ' s go . __eou__",
    "A hot potato . __eou__ What for ? __eou__ ",
]


@pytest.fixture
def path(tmp_path):
    file = tmp_path / "dialogues_test.txt"
    file.write_text("\n".join(LINES) + "\n", encoding="utf-8")
    return file


def test_every_turn_from_the_second_on_is_answered_from_its_whole_history(path):
    first = ("Some weed?", "Oh, umm, no thanks.", "I'll wait, don't worry.", "Let's go.")
    assert load_instances(path) == [
        Instance("dailydialog-test-1#2", first[:1], first[1], ""),
        Instance("dailydialog-test-1#3", first[:2], first[2], ""),
        Instance("dailydialog-test-1#4", first[:3], first[3], ""),
        Instance("dailydialog-test-2#2", ("A hot potato.",), "What for?", ""),
    ]
    dialogues = load_dialogues(path)
    assert dialogues[1].utterances == (Utterance("speaker", "A hot potato."), Utterance("listener", "What for?"))
    assert {(d.emotion, d.situation) for d in dialogues} == {("", "")}


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (" You ' Ve got  it , haven ' t we ? ", "You've got it, haven't we?"),
        ("I ’ Ve time , don ’ t I , ma ’ am ? At six o ' clock .", "I've time, don't I, ma'am? At six o'clock."),
        ("the ' The man and it ' s $ 39 . 99 ; 13 : 30 !", "the ' The man and it's $39.99; 13:30!"),
        ("code 413 , 447 ( why ? ) 10 % . ", "code 413, 447 (why?) 10%."),
        ('on " Nature " , 12 - hour , parents \' house', 'on " Nature ", 12 - hour, parents \' house'),
        ("Now ... it's don't 2,000", "Now... it's don't 2,000"),
        ("i did n't know she 's ill , and we 'll go .", "i didn't know she's ill, and we'll go."),
    ],
)
def test_blanks_of_the_tokeniser_go(text, wanted):
    assert written(text) == wanted


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("oh no ! i did n't know that .", "oh no! i didn't know that."),
        ("that is great ! ! !", "that is great!!!"),
        *((text, text) for text in ("Great :)", "Well , that's odd.", "I see ...", "Oh !\n  No .", "  so what", "")),
    ],
)
def test_blanks_that_people_typed_stay(text, wanted):
    assert as_typed(text) == wanted


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("Hi . __eou__ Ho . ", r"line 3: 'Ho \.' comes after the last __eou__"),
        ("", "line 3: a blank line before other dialogues"),
        ("Hi . __eou__", "line 3: a dialogue of one turn"),
        ("Hi . __eou__  __eou__ Ho . __eou__", "line 3: turn 2 is blank"),
    ],
)
def test_a_bad_line_is_named(path, line, says):
    path.write_text("\n".join([*LINES, line, LINES[0]]), encoding="utf-8")
    with pytest.raises(DataError, match=rf"dialogues_test\.txt, {says}"):
        load_dialogues(path)


def test_an_empty_file_is_named(tmp_path):
    (tmp_path / "empty.txt").write_text("", encoding="utf-8")
    with pytest.raises(DataError, match=r"empty\.txt, line 1: the file ends without a dialogue; use the released"):
        load_dialogues(tmp_path / "empty.txt")


def test_each_split_has_a_file(tmp_path, path):
    assert find_dailydialog(tmp_path) == path
    with pytest.raises(ConfigError, match=r"config\.data\.dir = .* holds no DailyDialog; .* dialogues_train\.txt"):
        find_dailydialog(tmp_path, split="train")
    with pytest.raises(ConfigError, match="no split 'valid'; it has train, validation, test"):
        find_dailydialog(tmp_path, split="valid")


@pytest.mark.real_data
def test_real_counts(real_data):
    path = find_dailydialog(real_data)
    dialogues, instances = load_dialogues(path), load_instances(path)
    turns = [utterance.text for dialogue in dialogues for utterance in dialogue.utterances]
    assert (len(dialogues), len(turns), len(instances)) == (1000, 7740, 6740)
    assert len({i.id for i in instances}) == len(instances)
    assert not any(" ." in text or " ' s " in text or "__" in text for text in turns)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("oh no! i'm sorry. did i ask (i hope)?", "Oh no! I'm sorry. Did I ask (I hope)?"),
        ('well... it is, i.e. so. "what?" he said', 'Well... it is, i.e. So. "What?" He said'),
        ("that is so sweet . so am i !", "That is so sweet . So am I !"),
        ("i saw Anna.", "i saw Anna."),
        ("", ""),
    ],
)
def test_a_text_in_lower_case_gets_the_capitals_of_sentences_and_of_i(text, wanted):
    assert with_capitals(text) == wanted
