"""Words that the vocabulary lacks: they get slots, responses are scored by them, and answers say them."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from empax.core.types import Instance
from empax.data.tokenizers import SPEAKER_TOKEN
from empax.data.words import train_words
from empax.decoding.settings import DecodeSettings
from empax.models.transformer import EncoderDecoder
from empax.parts.generator.answerer import Answerer, AnswerExamples
from empax.parts.generator.decoder import Decoder
from empax.parts.generator.word_level import WordLevelSettings
from empax.systems.reflectdiffu.examples import NO_PRIOR, ReflectExamples
from empax.systems.reflectdiffu.labels import TABLE_1
from empax.systems.reflectdiffu.pointer_generator import PointerGenerator
from empax.systems.reflectdiffu.settings import GeneratorTaskSettings, ReflectSettings
from empax.systems.reflectdiffu.stages import Parts
from empax.systems.reflectdiffu.tasks import ReflectDiffu
from tests.systems.learning import random_like

TOKENIZER = train_words(["i lost my dog , .", "i am so sorry ."] * 2 + ["unique gems"], min_count=2)
V, UNK, SLOTS = TOKENIZER.vocab_size, TOKENIZER.unk_id, 2
INSTANCES = [
    Instance("a#2", ("I lost my Zorblax.",), "So sorry zorblax and Quux.", "sad"),
    Instance("b#4", ("Aa bb", "cc", "my Aa dd, dd"), "Aa, dd or bb", "sad"),
]
FORM = GeneratorTaskSettings(
    reasons="", intents="", experts="none", second_intent=False, mimicry=False, intent_start=False, slots=SLOTS
)


def examples(instances=INSTANCES, slots=SLOTS, room=16):
    settings = ReflectSettings(max_context_tokens=room, max_target_tokens=12)
    return ReflectExamples(instances, TOKENIZER, settings, np.stack([NO_PRIOR] * len(instances)), {}, slots=slots)


def collate(made, length=16):
    return made.collate(np.arange(len(made)), length, np.random.default_rng(0))


def test_unknown_words_of_the_context_have_slots_the_newest_first():
    made = examples()
    assert made.words == [["zorblax"], ["dd", "aa"]]  # of "bb" and "cc" there is no slot left
    batch = collate(made)
    known = TOKENIZER.encode
    assert batch.source[0, batch.source_mask[0]].tolist()[2:] == [*known("i lost my"), V, *known(".")]
    assert batch.target[0, batch.target_mask[0]].tolist() == [*known("so sorry"), V, UNK, UNK, *known("."), 1]
    slots = batch.source[1][batch.source[1] >= V].tolist()
    assert slots == [V + 1, V + 1, V, V]
    assert batch.target[1, batch.target_mask[1]].tolist() == [V + 1, *known(","), V, UNK, UNK, 1]


def test_a_word_that_was_cut_with_its_context_is_an_unknown_word_of_the_response():
    cut = collate(examples(room=4))
    assert cut.source[1, :4].tolist() == [
        TOKENIZER.cls_id, TOKENIZER.token_id(SPEAKER_TOKEN), *TOKENIZER.encode(","), V,
    ]  # fmt: skip
    assert cut.target[1, cut.target_mask[1]].tolist() == [UNK, *TOKENIZER.encode(","), V, UNK, UNK, 1]


def test_without_slots_all_of_them_are_unknown():
    made = examples(slots=0)
    batch = collate(made)
    assert made.words == [[], []]
    assert max(batch.source.max(), batch.target.max()) < V
    assert (batch.target[0] == UNK).sum() == 3


@pytest.mark.parametrize(("changes", "slots"), [({}, 2), ({"slots": 0}, 0), ({"copying": False, "slots": 20}, 0)])
def test_a_stage_has_the_slots_of_its_settings(changes, slots):
    parts = Parts(dataclasses.replace(FORM, **changes), ReflectSettings(), TOKENIZER, None, {}, TABLE_1)
    assert parts.slots == slots
    assert getattr(parts.task().model, "slots", 0) == slots


@pytest.mark.parametrize("copying", [True, False])
def test_the_output_bias_begins_with_the_frequencies_of_words_and_is_trained(copying):
    stage = dataclasses.replace(FORM, copying=copying, slots=SLOTS if copying else 20)
    parts = Parts(stage, ReflectSettings(), TOKENIZER, None, {}, TABLE_1)
    plain = {"output_bias": np.zeros(V, np.float32), "output_embedding": 1.0}
    made = parts.initial({"model": {"gate": 2.0, "model": plain} if copying else plain, "emotion": 3.0}, [[5, V, 5]])
    inner = made["model"]["model"] if copying else made["model"]
    counts = np.ones(V) + 2 * (np.arange(V) == 5)  # a slot is no word of the vocabulary
    np.testing.assert_allclose(np.exp(inner["output_bias"]), counts / counts.sum(), rtol=1e-5)
    assert (inner["output_embedding"], made["emotion"]) == (1.0, 3.0)
    assert not copying or made["model"]["gate"] == 2.0
    model = parts.task().model
    assert (model.model if copying else model).config.output_bias == "trained"


@pytest.fixture(scope="module")
def answerer():
    """Of a generator whose gate only copies; it says the context's words."""
    sizes = WordLevelSettings(d_model=8, num_heads=2, head_dim=4, d_ff=8)
    plain = EncoderDecoder(sizes.config(V, TOKENIZER.start_id, tie_embeddings=False))
    settings = DecodeSettings("greedy", 4, suppress_tokens=(UNK, TOKENIZER.cls_id, TOKENIZER.token_id(SPEAKER_TOKEN)))
    decoder = Decoder(settings, TOKENIZER.start_id, TOKENIZER.eos_id, TOKENIZER.pad_id)
    task = ReflectDiffu(PointerGenerator(plain, SLOTS, UNK), decoder, FORM, None, ((0, 1, 2),) * 32)
    shapes = jax.eval_shape(task.init, jax.random.key(0), jax.tree.map(jnp.asarray, collate(examples())))
    own = random_like(shapes, seed=1)
    own["model"] |= {"gate": jnp.zeros_like(own["model"]["gate"]), "gate_bias": jnp.float32(-50.0)}

    def make(instances):
        made = examples(instances)
        return AnswerExamples(made, [{} for _ in instances], made.words)

    return Answerer(task, own, make, TOKENIZER, (16,))


def test_a_word_that_the_vocabulary_lacks_is_copied_and_costs_its_copy(answerer):
    """The answer says the word itself; in a response it costs no choice among rare words."""
    only = [Instance("a#2", ("Zorblax",), reply, "sad") for reply in ("zorblax", "quux")]
    copied, missed = answerer.respond(only, batch_size=2, seed=0)
    assert "zorblax" in copied.response.split()
    assert "<unk>" not in copied.response
    assert (copied.notes["num_unknown"], missed.notes["num_unknown"]) == (0, 1)
    ends = missed.notes["nll"] - np.log(TOKENIZER.rare_words) + np.log(1e-9)  # neither in the context nor said
    assert copied.notes["nll"] - ends < -np.log(0.2)  # one of [CLS], <speaker>, zorblax
