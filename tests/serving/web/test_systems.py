"""Models behind the server: a row of a batch says what it would say alone."""

import collections
import dataclasses
import json

import pytest

import empax
from empax.core.config import ConfigError
from empax.core.protocols import Reading
from empax.core.types import Prediction
from empax.decoding.settings import DecodeSettings
from empax.serving import streaming
from empax.serving.safety import ANSWER
from empax.serving.web import systems
from empax.serving.web.app import ServerSettings, make_app
from empax.serving.web.systems import Asked, ModelSystem, RunSystem, load_system
from tests.serving import test_text_model
from tests.serving.models import saved
from tests.serving.test_session import in_list
from tests.serving.web.test_app import talk

folder = test_text_model.folder  # a fixture

both = pytest.mark.parametrize("folder", ["t5", "llama"], indirect=True)


def replies(system, *asked):
    """What each is told in the end; the pieces before it are its beginning."""
    told, said = [""] * len(asked), {}
    for i, one in system.answer(asked):
        if isinstance(one, str):
            assert i not in said
            told[i] += one
        else:
            assert one.text.startswith(told[i])
            said[i] = one
    return [said[i] for i in range(len(asked))]


ROLES = ("user", "assistant", "user")
SAID = ["I feel sad today", "oh no what happened to you", "no", "what"]


def make(folder, **options):
    return ModelSystem("tiny", empax.load(folder[1]), **{"batch_size": 4, "max_tokens": 24, **options})


@both
def test_rows_that_go_together_say_what_they_say_alone(folder):
    system = make(folder)
    ways = [{"temperature": 0.0}, {}, {"temperature": 1.3}, {"temperature": 0.7, "top_p": 0.8}]
    asked = [Asked((text,), seed=i, **way) for way in ways for i, text in enumerate(SAID)]
    asked.append(Asked((SAID[0],), seed=0, number=1, temperature=1.3))
    alone = [replies(system, one)[0] for one in asked]
    groups = collections.defaultdict(list)
    for number, one in enumerate(asked):
        groups[system.group(one)].append(number)
    assert max(map(len, groups.values())) > 4  # other temperatures go together, too
    for numbers in groups.values():
        for start in range(0, len(numbers), 4):
            several = numbers[start : start + 4][::-1]
            assert replies(system, *(asked[n] for n in several)) == [alone[n] for n in several]
    likeliest = system.model.reply([SAID[0]], method="greedy", max_tokens=24)
    assert alone[0].text == likeliest
    assert alone[8] != alone[-1]  # another number draws other tokens
    unseeded = Asked((SAID[0],), temperature=1.3)
    assert replies(system, unseeded) != replies(system, unseeded)


@pytest.mark.parametrize("folder", ["t5"], indirect=True)
@pytest.mark.parametrize(
    "decoding",
    [{"num_beams": 3, "do_sample": True, "max_new_tokens": 12},
     DecodeSettings("sample", 12, num_samples=4, rerank="random"),
     DecodeSettings("sample", 12, num_samples=4, rerank="consensus")],
)  # fmt: skip
def test_beams_that_are_drawn_and_choices_of_chance_go_together_too(folder, decoding):
    model = dataclasses.replace(empax.load(folder[1]), decoding=decoding)
    system = ModelSystem("tiny", model, batch_size=4, max_tokens=12)
    asked = [Asked((text,), seed=seed) for text, seed in zip(SAID[:3], (1, 2, 1), strict=True)]
    assert len({system.group(one) for one in asked}) == 1
    assert replies(system, *asked) == [replies(system, one)[0] for one in asked]
    assert len({replies(system, Asked((SAID[0],), seed=seed))[0].text for seed in range(4)}) > 1


BEAM = {"num_beams": 3, "no_repeat_ngram_size": 2, "max_new_tokens": 24}
WAYS = ({"temperature": 0.0}, {"temperature": 1.0})


@both
def test_a_reply_comes_in_parts_and_ends_as_the_unstreamed_one(folder, monkeypatch):
    model = empax.load(folder[1])
    beams = ModelSystem("tiny", dataclasses.replace(model, decoding=BEAM), batch_size=4, max_tokens=24)
    for system, ways in ((make(folder), WAYS), (beams, ({},))):
        asked = [Asked((text,), seed=1, **way) for way in ways for text in SAID[:2]]
        told = [list(system.answer([one])) for one in asked]
        assert max(map(len, told)) > 3
        monkeypatch.setattr(systems, "PART_TOKENS", 1000)
        for one, pieces in zip(asked, told, strict=True):
            *_, (_, whole) = system.answer([one])
            assert pieces[-1] == (0, whole)
            assert whole.text.startswith("".join(piece for _, piece in pieces[:-1]))
            assert [type(piece) for _, piece in pieces[:-1]] == [str] * (len(pieces) - 1)
        monkeypatch.undo()
    assert whole.text == model.reply([SAID[1]], **BEAM)
    drawn = {replies(beams, Asked((SAID[0],), seed=1, temperature=t))[0].text for t in (0.05, 1.0, 3.0)}
    assert len(drawn) == 3  # not beams, which read no temperature here
    every = [Asked((text,)) for text in SAID]
    # Some end before others, who go on alone.
    assert replies(beams, *every) == [replies(beams, one)[0] for one in every]


@pytest.mark.parametrize("folder", ["t5"], indirect=True)
def test_what_nobody_waits_for_any_more_is_given_up(folder, monkeypatch):
    parts, go_on = [], streaming._go_on
    monkeypatch.setattr(streaming, "_go_on", lambda *given: parts.append(given[-1]) or go_on(*given))
    system, here = make(folder), {0: True, 1: True}
    asked = [Asked((text,), seed=1, temperature=1.0, stop=("\n",)) for text in SAID[:2]]
    whole = replies(system, *asked)
    assert len(parts) > 3
    del parts[:]
    told = system.answer(asked, lambda i: here[i])
    next(told)
    here[1] = False
    assert dict(told)[0] == whole[0]  # the other is as it was
    assert any(gone[1] and not gone[0] for gone in parts)
    del parts[:]
    here[0] = False
    assert list(system.answer(asked, lambda i: here[i])) == []
    assert len(parts) == 1


@pytest.mark.parametrize("folder", ["t5"], indirect=True)
def test_lengths_and_usage_are_true_and_what_cannot_be_is_named(folder):
    system = load_system(str(folder[1]), batch_size=4, max_tokens=24)  # a folder as Hugging Face's are
    assert replies(make(folder, max_tokens=256), Asked((SAID[0],), temperature=0))[0].completion_tokens <= 64
    whole, short = replies(system, Asked((SAID[0],), temperature=0), Asked((SAID[0],), temperature=0, max_tokens=3))
    assert whole.text.startswith(short.text)
    assert (short.completion_tokens, short.cut) == (3, True)
    assert whole.prompt_tokens == len(system.model.tokenizer.encode(SAID[0])) + 1
    assert whole.completion_tokens <= 24
    with pytest.raises(ConfigError, match="max_tokens = 25 must be from 1 to 24"):
        system.group(Asked(("no",), max_tokens=25))
    vectors, tokens = system.embed(SAID)
    tokenizer = system.model.tokenizer
    assert (len(vectors), tokens) == (4, sum(len(tokenizer.encode(text)) + 1 for text in SAID))
    tokenizer.reading = Reading(prompt="no ", max_tokens=5)
    assert system.embed(["no", SAID[1]])[1] == len(tokenizer.encode("no no")) + 1 + 5


@pytest.mark.parametrize("folder", ["t5"], indirect=True)
def test_a_text_too_long_for_memory_is_not_embedded(folder, monkeypatch):
    system, read = make(folder), []
    monkeypatch.setattr(type(system.model), "embed", lambda _, texts: read.append(texts))
    system.embed(["no"])
    body = {"model": "tiny", "input": ["no", "no " * systems.MOST_SOURCE_TOKENS]}

    async def go(http):
        return await http.post("/v1/embeddings", json=body)

    refused = talk(make_app([system], ServerSettings()), go)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "input")
    assert "512 are allowed" in refused.text
    assert read == [["no"]]


@pytest.mark.parametrize("kind", ["bart", "gpt2"])
def test_replies_fit_into_few_positions_and_are_those_of_python(kind, tmp_path):
    """Neither a power of two nor a multiple of the shortest padded source; the folder has no length."""
    path = saved(tmp_path, kind, **{"bart": {"max_position_embeddings": 100}, "gpt2": {"n_positions": 100}}[kind])
    system = load_system(str(path), batch_size=4, max_tokens=256)
    assert system._usual == system.model.generator.reply_call({"max_tokens": None}).settings.max_tokens == 50
    turn = Asked(("no sad I feel " * 30,), temperature=0)
    assert replies(system, turn)[0].text == system.model.reply(turn.turns)
    assert system._source_tokens == {"bart": 100, "gpt2": 50}[kind]


def test_a_long_conversation_is_cut_where_there_are_many_positions(tmp_path):
    system = load_system(str(saved(tmp_path, "bart", max_position_embeddings=1024)), batch_size=4, max_tokens=256)
    assert system._source_tokens == systems.MOST_SOURCE_TOKENS
    assert system._usual == system.model.generator.reply_call({}).settings.max_tokens == 64
    assert system.model.generator.call({}).settings.max_tokens == 20


@pytest.mark.parametrize("folder", ["t5"], indirect=True)
def test_danger_gets_the_fixed_answer_at_once(folder):
    danger = make(folder).at_once(Asked(("I want to kill myself.",)))
    assert (danger.text, danger.completion_tokens, danger.why) == (ANSWER, 0, {"fixed": True})
    assert make(folder).at_once(Asked(("no",))) is None
    later = Asked(("I want to kill myself.", ANSWER, "no"))
    assert make(folder).group(later) == make(folder).group(Asked(("no",)))  # the fixed answer is not read
    assert make(folder, before=None).at_once(Asked(("I want to kill myself.",))) is None


def test_a_run_decodes_as_its_recipe_says():
    with pytest.raises(ConfigError, match="temperature: this system decodes as its recipe says"):
        RunSystem("run", None, batch_size=4).group(Asked(("x",), temperature=1.0))


@dataclasses.dataclass(frozen=True)
class Numbered:
    """A session that says its seed."""

    answerer: None = None
    before: None = None
    seed: int = 5
    notes: dict = dataclasses.field(default_factory=dict)

    def replies(self, contexts, *, seeds):
        said = [f"seed {seed} heard" for seed in seeds]
        return [Prediction(tuple(c), one, "", notes=self.notes) for c, one in zip(contexts, said, strict=True)]


def test_choices_of_a_run_differ_in_their_seeds():
    run = RunSystem("run", Numbered(), batch_size=4)
    said = replies(run, *(Asked(("x",), number=i) for i in range(3)), Asked(("x",), seed=9))
    own, second, third, other = (int(one.text.split()[1]) for one in said)
    assert (own, other) == (5, 9)
    assert len({second, third, *range(5, 15)}) == 12  # nor that of somebody who asks with the next seed
    assert [one.completion_tokens for one in said] == [4] * 4  # the end is one
    assert [i for i, _ in run.answer([Asked(("x",))] * 3, lambda row: row != 1)] == [0, 2]
    assert not any(one.cut for one in said)
    (stopped,) = replies(run, Asked(("x",), stop=(" heard",)))
    assert (stopped.text, stopped.completion_tokens) == ("seed 5", 2)
    run = RunSystem("run", Numbered(notes={"cut": True}), batch_size=4)
    (cut,) = replies(run, Asked(("x",)))
    assert (cut.text, cut.completion_tokens, cut.cut) == ("seed 5 heard", 3, True)  # it has no end
    assert replies(run, Asked(("x",), stop=(" heard",))) == [stopped]


def test_a_finished_run_is_served_with_what_stands_behind_its_replies(finished):
    system = load_system(str(finished), batch_size=4, max_tokens=24, before=in_list)
    assert (system.name, system.batch_size) == (finished.name, 4)
    session = system._session = dataclasses.replace(system._session, head=system._session.answerer.heads[0])
    told = ["I finally passed my exam!", "Great!", "I am so happy."]
    found = session.reply(told)
    messages = [{"role": role, "content": said} for role, said in zip(ROLES, told, strict=True)]
    body = {"model": system.name, "messages": messages}
    piece = (found.response.split() or ["x"])[-1]

    async def go(http):
        changes = {}, {"stream": True, "seed": 3}, {"temperature": 0}, {"stop": piece}
        return [await http.post("/v1/chat/completions", json={**body, **more}) for more in changes]

    whole, streamed, warm, short = talk(make_app([system], ServerSettings(per_minute=0)), go)
    (choice,) = whole.json()["choices"]
    assert choice["message"]["content"] == found.response
    why = choice["empax"]
    assert why["emotion"] == found.emotion_prediction
    assert why["attributes"] == dict(found.attributes)
    assert [(e["source"], e["score"]) for e in why["exemplars"]] == [(e["id"], e["score"]) for e in found.exemplars]
    assert why["exemplars"][0]["reply"] == found.exemplars[0]["response"]
    assert json.loads(streamed.text.split("data: ")[-2])["choices"][0]["empax"]["exemplars"]
    assert warm.json()["error"]["param"] == "temperature"
    assert short.json()["choices"][0]["message"]["content"] == found.response[: found.response.find(piece)]
    several = [Asked(tuple(told)), Asked(("My dog died.",), seed=4), Asked(("We won the cup!",), number=2)]
    assert len({system.group(one) for one in several}) == 1
    assert replies(system, *several) == [replies(system, one)[0] for one in several]
    assert system.at_once(Asked(("I want to kill myself.",))).text == ANSWER
    with pytest.raises(ConfigError, match="this system is a run that answers, and embeds no texts"):
        system.embed(["x"])
