"""Any task answers: one that decodes a bag of words, with an intent, knowledge behind each answer, and no head."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from empax.core.files import DataError, write_jsonl
from empax.core.types import EMOTIONS, Generated, Instance, Prediction
from empax.data.batches import SequenceExamples
from empax.data.bpe import train_bpe
from empax.data.words import train_words
from empax.decoding import sampling
from empax.decoding.settings import DecodeSettings
from empax.models.fusion_in_decoder import FusionInDecoder
from empax.models.t5 import t5_config
from empax.models.transformer import EncoderDecoder
from empax.parts.generator import answerer as answerer_module
from empax.parts.generator.answerer import Answerer, AnswerExamples
from empax.parts.generator.decoder import Decoder
from empax.parts.generator.settings import QuestionSettings
from empax.pipeline import answers
from empax.pipeline.answers import KeptAnswers

INTENTS = ("ask", "agree", "console")
CORPUS = ["i lost my keys", "we won the cup", "oh no", "well done"]
TOKENIZER = train_bpe(CORPUS, vocab_size=280)
ASKED = [
    Instance(f"d{i}#2", (text,), reply, "sad", {"context_attributes": {"sentiment": "low"}})
    for i, (text, reply) in enumerate([(CORPUS[0], CORPUS[2]), (CORPUS[1], CORPUS[3]), (CORPUS[0], CORPUS[3])])
]


@dataclasses.dataclass(frozen=True)
class Bag:
    """Says the tokens that its weights like most, given how often each is asked."""

    heads: tuple[str, ...] = ()
    tokens: int = 2
    decoder: Decoder | None = None

    def logits(self, params, batch):
        seen = jax.nn.one_hot(batch.source, TOKENIZER.vocab_size) * batch.source_mask[..., None]
        return jnp.einsum("BSV,VW->BW", seen, params["weights"])

    def generate(self, params, frozen, batch, rng):
        found = jax.lax.top_k(self.logits(params, batch), self.tokens)[1].astype(jnp.int32)
        return Generated(found[:, None], jnp.zeros((len(found), 1)))

    def read(self, params, batch):
        logits = self.logits(params, batch)
        nll = -jnp.take_along_axis(jax.nn.log_softmax(logits), batch.target, axis=1)
        length = batch.source_mask.sum(axis=1)
        return {
            "nll": (nll * batch.target_mask).sum(axis=1), "num_tokens": batch.target_mask.sum(axis=1),
            "intent": length % len(INTENTS), **dict.fromkeys(self.heads, length),
        }  # fmt: skip


PARAMS = {"weights": np.random.default_rng(0).normal(size=(280, 280)).astype(np.float32)}


def examples(instances):
    sources = TOKENIZER.encode_batch([i.context[-1] for i in instances])
    targets = TOKENIZER.encode_batch([i.response or "oh" for i in instances])
    made = SequenceExamples(sources, targets, pad_id=TOKENIZER.pad_id, max_target_tokens=16)
    return AnswerExamples(made, [{"knowledge": [f"fact {i.id}"]} for i in instances])


def answerer(task=None, **options):
    return Answerer(task or Bag(), PARAMS, examples, TOKENIZER, (16, 32), labels={"intent": INTENTS}, **options)


@dataclasses.dataclass(frozen=True)
class Searched:
    """Contexts with what has been told of them, and exemplars that are found by the context alone."""

    encoder = pairs = None

    def __call__(self, instances):
        said = [" ".join([i.context[-1], *i.notes.get("told", {}).values()]) for i in instances]
        return examples([dataclasses.replace(i, context=(text,)) for i, text in zip(instances, said, strict=True)])

    def find(self, instances):
        assert all("?" not in i.context[-1] for i in instances)
        return np.zeros((len(instances), 1), np.int64), np.zeros((len(instances), 1))

    def show(self, instances, rows, scores):
        assert rows.shape == scores.shape == (len(instances), 1)
        return self(instances)


WHAT, WHY = QuestionSettings("emotion", "what?"), QuestionSettings("intent", "why?")


def asks_first(*questions, task=None, searched=None, **options):
    given = task or Bag(tokens=9), PARAMS, searched or Searched(), TOKENIZER, (64,)
    return Answerer(*given, labels={"intent": INTENTS}, questions=questions, **options)


def test_what_a_model_is_asked_first_is_told_to_the_next_question_and_to_the_reply():
    found = asks_first(WHAT, WHY).respond(ASKED, batch_size=2, seed=0)

    def said(text):
        logits = PARAMS["weights"][TOKENIZER.encode(text)].sum(axis=0)
        return TOKENIZER.decode(np.argsort(-logits)[:9].tolist()).strip()

    def words(text):
        return " ".join(re.findall(r"[^\W\d_][\w'-]*", text)[:3])

    for instance, row in zip(ASKED, found, strict=True):
        context = instance.context[-1]
        told = {"emotion": words(said(f"{context}\n\nwhat?"))}
        told["intent"] = words(said(" ".join([f"{context}\n\nwhy?", *told.values()])))
        told = {name: value for name, value in told.items() if value}
        assert row.notes.get("told", {}) == told
        assert row.response == said(" ".join([context, *told.values()]))
        assert (row.context, row.reference, row.id) == (instance.context, instance.response, instance.id)
    assert any("told" in row.notes for row in found)
    plain = asks_first().respond(ASKED, batch_size=2, seed=0)
    assert [row.response for row in plain] == [said(i.context[-1]) for i in ASKED]


def test_who_answers_people_notes_an_answer_without_an_end():
    other = TOKENIZER.eos_id + 8
    ids = TOKENIZER.start_id, TOKENIZER.eos_id, TOKENIZER.pad_id
    both = Decoder(DecodeSettings(more_eos_ids=(other,)), *ids)
    forced = Decoder(DecodeSettings(end_at_limit=True), *ids)
    for last, decoder, single, cut in (
        (TOKENIZER.eos_id, None, True, False),
        (other, None, True, True),
        (other, None, False, False),
        (other, both, True, False),
        (TOKENIZER.eos_id, forced, True, True),  # whoever is cut at the limit says it there
    ):
        made = answerer(Bag(decoder=decoder), single=single)
        weights = np.zeros_like(PARAMS["weights"])
        weights[:, [7, last]] = 2.0, 1.0  # the likeliest first
        made.take({"weights": weights})
        (found,) = made.respond(ASKED[:1], batch_size=1, seed=0)
        assert found.notes.get("cut", False) is cut


def test_what_was_told_is_the_seeds_and_is_forgotten_with_the_parameters_and_by_who_answers_people():
    asked = []

    class Counting(Searched):
        def find(self, instances):
            asked.append(len(instances))
            return super().find(instances)

    made = asks_first(WHAT, searched=Counting())
    for seed in (0, 0, 1, 0):
        made.respond(ASKED, batch_size=2, seed=seed)
    assert asked == [2, 2]  # the two contexts once for each seed
    made.take(PARAMS)
    made.respond(ASKED, batch_size=2, seed=0)
    assert asked == [2, 2, 2]
    served = asks_first(WHAT, searched=Counting(), single=True)
    for _ in range(2):
        served.respond(ASKED[:1], batch_size=1, seed=0)
    assert asked[3:] == [1, 1]
    assert len(served._told) == 1


@dataclasses.dataclass(frozen=True)
class Drawing(Bag):
    """Draws its tokens."""

    def generate(self, params, frozen, batch, rng):
        noise = sampling.noise(rng, jax.random.gumbel, (len(batch.source), TOKENIZER.vocab_size))
        found = jax.lax.top_k(self.logits(params, batch) + 3.0 * noise, self.tokens)[1].astype(jnp.int32)
        return Generated(found[:, None], jnp.zeros((len(found), 1)))


@pytest.mark.parametrize("weighed", [False, True])
def test_questions_are_asked_beside_the_exemplars_that_are_given(weighed, monkeypatch):
    """Not beside its own, whose answers the prompt would then hold."""
    shown = []

    class Showing(Searched):
        def show(self, instances, rows, scores):
            shown.append((instances[0].context[-1].endswith("what?"), rows.ravel().tolist()))
            return super().show(instances, rows, scores)

    made = asks_first(WHAT, searched=Showing())
    monkeypatch.setattr(made, "_each", lambda examples, *_: [Prediction(("a",), "b", "")] * len(examples))
    for rows in ([-1, 7, -1], [-1, 7, -1], [7, 7, -1]):
        given = np.array(rows)[:, None]
        if weighed:
            made.weigh(ASKED, given, batch_size=2, seed=0)
        else:
            made.respond(ASKED, batch_size=2, seed=0, exemplars=given)
    replies = [(False, [-1, 7, -1]), (False, [-1, 7, -1]), (False, [7, 7, -1])]
    assert shown == [(True, [-1, 7]), *replies[:2], (True, [7]), replies[2]]


@pytest.mark.parametrize("seed", [0, [7, 8]])
def test_each_question_and_the_reply_draw_by_keys_of_their_own(seed):
    made = asks_first(WHAT, WHY, task=Drawing(tokens=9))
    keys, ask = [], made._answer
    made._answer = lambda params, batch, rng: keys.append(getattr(rng, "keys", rng)) or ask(params, batch, rng)
    made.respond(ASKED[:2], batch_size=2, seed=seed)
    found = np.concatenate([np.asarray(jax.random.key_data(key)).reshape(-1, 2) for key in keys])
    assert len({tuple(row) for row in found.tolist()}) == len(found) == 3 * np.size(seed)


def test_with_a_seed_for_each_an_answer_is_the_same_alone_and_among_others():
    made = asks_first(WHAT, task=Drawing(tokens=9), single=True)
    asked, seeds = [ASKED[1], ASKED[0], ASKED[0], ASKED[1]], [7, 7, 8, 7]
    alone = [made.respond([i], batch_size=1, seed=seed)[0] for i, seed in zip(asked, seeds, strict=True)]
    assert len({row.response for row in alone}) == 3
    assert any("told" in row.notes for row in alone)
    for size in (4, 3):  # a second batch, too
        found = made.respond(asked, batch_size=size, seed=seeds)
        assert [(row.response, row.notes.get("told")) for row in found] == [
            (row.response, row.notes.get("told")) for row in alone
        ]


class Remembering(Bag):
    """Its state before a token is the token."""

    def target_states(self, params, batch):
        return batch.target[..., None] * jnp.ones((1, 1, 2))

    def with_states(self, params, states):
        return {**params, "neighbours": states}


def test_the_states_of_all_real_tokens_are_remembered():
    made = answerer(Remembering())
    made.remember(ASKED, batch_size=2)
    states = made._params["neighbours"]
    tokens = [token for i in ASKED for token in TOKENIZER.encode(i.response)]
    assert sorted(np.asarray(states.tokens).tolist()) == sorted(tokens)
    np.testing.assert_array_equal(states.keys, np.asarray(states.tokens, np.float16)[:, None].repeat(2, axis=1))
    assert len(made.respond(ASKED, batch_size=2, seed=0)) == 3


def test_what_a_task_generates_and_reads_is_told():
    found = answerer().respond(ASKED, batch_size=2, seed=0)
    assert [row.id for row in found] == ["d0#2", "d1#2", "d2#2"]
    for instance, row in zip(ASKED, found, strict=True):
        ids = TOKENIZER.encode(instance.context[-1])
        logits = PARAMS["weights"][ids].sum(axis=0)
        assert row.response == TOKENIZER.decode(np.argsort(-logits)[:2].tolist())
        assert row.notes["intent"] == INTENTS[len(ids) % 3]
        assert row.notes["knowledge"] == [f"fact {instance.id}"]
        target = TOKENIZER.encode(instance.response)
        expected = np.logaddexp.reduce(logits) * len(target) - logits[target].sum()
        assert row.notes["nll"] == pytest.approx(expected, rel=1e-4)
        assert row.notes["num_tokens"] == len(target)
        assert (row.exemplars, row.emotion_prediction, row.notes["emotion_by_head"]) == ((), "", {})
        assert row.attributes == {"sentiment": "low"}


@pytest.mark.parametrize(("backend", "first"), [("cpu", "answer"), ("gpu", "batch")])
def test_the_host_makes_the_next_batch_while_a_gpu_answers_the_same(backend, first, monkeypatch):
    expected, events = answerer().respond(ASKED, batch_size=1, seed=0), []
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    collate, fetch = SequenceExamples.collate, jax.device_get
    monkeypatch.setattr(SequenceExamples, "collate", lambda *args: events.append("batch") or collate(*args))
    monkeypatch.setattr(jax, "device_get", lambda tree: events.append("answer") or fetch(tree))
    assert answerer().respond(ASKED, batch_size=1, seed=0) == expected
    assert events[:2] == ["batch", first]
    assert sorted(events) == ["answer"] * 3 + ["batch"] * 3


class Reads(Bag):
    """Has passages that can be read before it answers."""

    model = FusionInDecoder(EncoderDecoder(t5_config("t5-tiny")))


@pytest.mark.parametrize(
    ("backend", "single", "apart"), [("cpu", False, True), ("cpu", True, False), ("gpu", False, False)]
)
def test_passages_are_read_without_padding_on_a_cpu_alone(backend, single, apart, monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    monkeypatch.setattr(answerer_module, "local_mesh", lambda _: None)  # one device
    assert (answerer(Reads(), single=single)._reader is not None) == apart


def test_heads_are_asked_alone_and_with_the_answers():
    made = answerer(Bag(heads=("sense",)))
    lengths = [len(TOKENIZER.encode(i.context[-1])) for i in ASKED]
    expected = [{"sense": EMOTIONS[length]} for length in lengths]
    assert made.emotions(ASKED, batch_size=2) == expected
    assert [row.notes["emotion_by_head"] for row in made.respond(ASKED, batch_size=3, seed=0)] == expected
    assert answerer().emotions(ASKED, batch_size=2) == [{}] * 3


@dataclasses.dataclass(frozen=True)
class Compared(Bag):
    """Also gives the likelihood with other inputs, which change nothing."""

    def read(self, params, batch):
        read = super().read(params, batch)
        return {**read, "nll_of_others": read["nll"]}


def test_an_unknown_word_costs_the_choice_among_rare_ones():
    words = train_words([*CORPUS, "i lost we won oh no well done"], min_count=2)
    assert words.rare_words == 4
    found, plain = answerer(Compared()), answerer()
    found.tokenizer = words
    asked = [dataclasses.replace(ASKED[0], response="oh no my keys zyzzyva"), ASKED[1]]
    for own, other in zip(*(a.respond(asked, batch_size=2, seed=0) for a in (found, plain)), strict=True):
        unknown = {"d0#2": 3, "d1#2": 0}[own.id]
        assert own.notes["num_unknown"] == unknown
        assert own.notes["nll"] == pytest.approx(other.notes["nll"] + unknown * np.log(4), abs=1e-4)
        assert own.notes["nll_of_others"] == own.notes["nll"]
        assert "num_unknown" not in other.notes


class KilledError(Exception):
    """In place of a signal: what is on disk is the same."""


def many(count):
    return [Instance(f"d{i}#2", (CORPUS[i % 4],), CORPUS[i // 4 % 4], "sad") for i in range(count)]


def test_an_evaluation_that_is_killed_goes_on_and_answers_the_same(tmp_path, monkeypatch):
    monkeypatch.setattr(answers, "PART_SECONDS", 0.0)
    made, asked, folder = answerer(Drawing(heads=("sense",))), many(11), tmp_path / "evaluate" / "parts"
    whole = made.respond(asked, batch_size=2, seed=3)

    def stopped_after(batches):
        kept = KeptAnswers(folder, "these")
        before, add = len(kept), kept.add

        def until(batch, rows):
            if batch == batches:
                raise KilledError
            add(batch, rows)

        monkeypatch.setattr(kept, "add", until)
        with pytest.raises(KilledError):
            made.respond(asked, batch_size=2, seed=3, kept=kept)
        return before

    assert [stopped_after(2), stopped_after(3)] == [0, 4]
    parts = sorted(folder.glob("*.jsonl"))
    parts[1].write_bytes(parts[1].read_bytes()[:-9])  # a damaged part is answered again
    kept = KeptAnswers(folder, "these")
    assert len(kept) == 4
    calls = []
    monkeypatch.setattr(made, "_answer", lambda *rest, answer=made._answer: calls.append(1) or answer(*rest))
    found = made.respond(asked, batch_size=2, seed=3, kept=kept)
    assert len(calls) == 4  # of six batches
    write_jsonl(tmp_path / "whole.jsonl", whole)
    write_jsonl(tmp_path / "found.jsonl", found)
    assert (tmp_path / "found.jsonl").read_bytes() == (tmp_path / "whole.jsonl").read_bytes()
    assert len(KeptAnswers(folder, "others")) == 0  # to something else
    kept.remove()
    assert not folder.exists()


def test_answers_to_questions_are_kept_too(tmp_path, monkeypatch):
    given = {"batch_size": 2, "seed": 3}
    kept = KeptAnswers(tmp_path, "these")
    whole = asks_first(WHAT, WHY, task=Drawing(tokens=9)).respond(many(5), **given, kept=kept)
    kept.flush()
    made = asks_first(WHAT, WHY, task=Drawing(tokens=9))
    monkeypatch.setattr(made, "_answer", lambda *_: pytest.fail("it is asked again"))
    assert made.respond(many(5), **given, kept=KeptAnswers(tmp_path, "these")) == whole


def test_the_emotions_are_those_of_prompts_with_what_was_told():
    made = asks_first(WHAT, task=Drawing(tokens=9, heads=("sense",)))
    replies = made.respond(ASKED, batch_size=2, seed=3)
    assert made.emotions(ASKED, batch_size=2, seed=3) == [row.notes["emotion_by_head"] for row in replies]


def test_answers_are_written_now_and_then_and_time_is_summed_up(tmp_path, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(answers.time, "monotonic", lambda: now[0])
    kept = KeptAnswers(tmp_path, "these")
    (one,) = answerer().respond(ASKED[:1], batch_size=1, seed=0)
    for batch, seconds in enumerate((10.0, 15.0, 6.0, 1.0)):
        now[0] += seconds
        kept.add(batch, {batch: one})
    assert [path.name for path in tmp_path.glob("*.jsonl")] == ["00000000.jsonl"]
    kept.flush()
    kept.flush()
    again = KeptAnswers(tmp_path, "these")
    assert (len(again), again.seconds) == (4, 32.0)
    assert again.get(3) == {3: one}
    assert again.get(4) is None
    nothing = dataclasses.replace(one, notes={"nll": float("nan")})
    again.add(4, {4: nothing})
    with pytest.raises(DataError, match="it holds nan"):
        again.flush()
