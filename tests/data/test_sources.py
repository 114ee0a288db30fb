"""Chat prompts as sources: the text of the template, the newest turns, columns of their own for the exemplar."""

import numpy as np
import pytest
import tokenizers as rust
from tokenizers import decoders, models, pre_tokenizers, trainers

from empax.core.config import ConfigError
from empax.core.types import ATTRIBUTES, Instance
from empax.data.chat import ChatTemplate
from empax.data.exemplars import ContextExamples, Corpus, ExemplarExamples
from empax.data.sources import INSTRUCTION, ChatForm, LayoutSettings
from empax.data.tokenizers import SubwordTokenizer

TEMPLATE = ChatTemplate(
    opening="<|im_start|>system\n",
    first_user="<|im_end|>\n<|im_start|>user\n",
    user_to_assistant="<|im_end|>\n<|im_start|>assistant\n",
    assistant_to_user="<|im_end|>\n<|im_start|>user\n",
    answer="<|im_end|>\n<|im_start|>assistant\n",
)
LAYOUT = LayoutSettings(max_context_tokens=60, max_passage_tokens=24, max_target_tokens=8)
NOTES = {"context_attributes": {"sentiment": "low"}, "response_attributes": {"sentiment": "high"}}
LONG = ("I lost my old dog today.", "Oh no, how old was he?", "He was eleven and very kind.")
INSTANCES = [
    Instance("a#1", LONG[:1], LONG[1], "sad", NOTES),
    Instance("a#3", LONG, "He sounds lovely.", "sad", NOTES),
    Instance("b#1", ("I won a race!",), "Well done!", "joyful", NOTES),
]


@pytest.fixture(scope="module")
def tokenizer():
    backend = rust.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=special, initial_alphabet=sorted(alphabet))
    backend.train_from_iterator([*LONG, INSTRUCTION] * 3, trainer=trainer)
    return SubwordTokenizer(backend, pad="<|endoftext|>", eos="<|im_end|>", start="<|im_start|>")


def form(tokenizer, *, attributes=False, exemplars=False, layout=LAYOUT):
    return ChatForm(tokenizer, layout, attributes, TEMPLATE, exemplars)


def text(tokenizer, ids):
    return tokenizer.backend.decode([int(i) for i in ids], skip_special_tokens=False)


def test_prefix_context_and_start_are_the_templates_prompt(tokenizer):
    chat = form(tokenizer)
    (context,) = chat.contexts(INSTANCES[1:2])
    prompt = text(tokenizer, [*chat.prefix, *context.ids, chat.start_id])
    turns = LONG[0] + TEMPLATE.user_to_assistant + LONG[1] + TEMPLATE.assistant_to_user + LONG[2]
    assert prompt == TEMPLATE.opening + INSTRUCTION + TEMPLATE.first_user + turns + TEMPLATE.answer


def test_a_context_that_is_too_long_keeps_whole_newest_turns_then_the_last_ones_end(tokenizer):
    whole = form(tokenizer).contexts(INSTANCES[1:2])[0].size
    tight = LayoutSettings(max_context_tokens=whole - 1, max_passage_tokens=24, max_target_tokens=8)
    kept = form(tokenizer, layout=tight).contexts(INSTANCES[1:2])[0].ids
    assert text(tokenizer, kept).startswith(TEMPLATE.first_user + LONG[2])  # the speaker's and the answer went together
    frame = form(tokenizer).contexts([Instance("c#1", ("",), "", "", {})])[0].size
    tighter = LayoutSettings(max_context_tokens=frame + 4, max_passage_tokens=24, max_target_tokens=8)
    kept = form(tokenizer, layout=tighter).contexts(INSTANCES[1:2])[0].ids
    assert len(kept) == frame + 4
    ending = tokenizer.encode(tokenizer.mark(TEMPLATE.answer))
    assert tokenizer.encode(LONG[2])[-4:] == kept[-len(ending) - 3 :][:4]
    with pytest.raises(ConfigError, match="max_context_tokens = 3 leaves"):
        form(tokenizer, layout=LayoutSettings(max_context_tokens=3)).contexts(INSTANCES)


def test_attributes_are_words_in_front_of_the_context_and_behind_the_exemplars_response(tokenizer):
    chat = form(tokenizer, attributes=True)
    assert "sentiment" in ATTRIBUTES
    context = chat.contexts(INSTANCES[:1])[0]
    assert text(tokenizer, context.attributes) == "\n(sentiment low)"
    passage = chat.passages(INSTANCES[2:])[0]
    assert text(tokenizer, passage.ids).endswith("Well done!\n(sentiment high)")
    assert form(tokenizer).contexts(INSTANCES[:1])[0].attributes == []


def test_an_exemplar_that_is_too_long_keeps_its_response(tokenizer):
    (passage,) = form(tokenizer).passages(INSTANCES[1:2])
    assert passage.size == LAYOUT.max_passage_tokens
    assert text(tokenizer, passage.ids).endswith("He sounds lovely.")


def test_exemplar_and_context_have_columns_of_their_own(tokenizer):
    chat = form(tokenizer, exemplars=True)
    corpus = Corpus.of(INSTANCES, chat, tokenizer)
    examples = ExemplarExamples(INSTANCES, corpus, np.array([[2, -1], [2, -1], [0, 1]]), chat, tokenizer)
    length = int(examples.lengths[:, 0].max())
    batch = examples.collate(np.array([1, 2]), length, np.random.default_rng(0))
    assert batch.source.shape == (2, 2, length)
    contexts, passages = chat.contexts(INSTANCES), chat.passages(INSTANCES)
    for b, i, k, row in ((0, 1, 0, 2), (1, 2, 0, 0), (1, 2, 1, 1)):
        ids, mask = batch.source[b, k], batch.source_mask[b, k]
        assert ids[: chat.split][mask[: chat.split]].tolist() == passages[row].ids
        assert ids[chat.split :][mask[chat.split :]].tolist() == contexts[i].ids
    assert not batch.source_mask[0, 1].any()


def test_without_exemplars_a_row_has_no_room_for_one(tokenizer):
    chat = form(tokenizer)
    examples = ContextExamples(INSTANCES, chat)
    assert examples.lengths[:, 0].tolist() == [c.size for c in chat.contexts(INSTANCES)]
    with pytest.raises(ConfigError, match="leaves no room beside 24 tokens of an exemplar"):
        form(tokenizer, exemplars=True).arrays([None], 20)
