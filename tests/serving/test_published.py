"""Adapters that come with empax, by their names: on a small random model in the wheel's place, and as published."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
import transformers
from tokenizers import processors

import empax
from empax.core.config import ConfigError
from empax.core.recipe import load_recipe
from empax.data import wheels
from empax.data.bpe import train_bpe
from empax.data.sample import load_dialogues
from empax.data.tokenizer_folders import load_tokenizer
from empax.data.wheels import FLAN_T5, NAMED, PUBLISHED, SMOLLM2_REPLIES, T5_REPLIES
from empax.decoding.generation_config import FILE
from tests.serving.models import WIDER, saved

TEXTS = ["I feel sad today", "oh no what happened to you"]
CASES = [pytest.param(name, marks=pytest.mark.slow) for name in PUBLISHED]
THE_WHEEL = NAMED[FLAN_T5]
CONSENSUS_OF_T5 = ("nec:consensus", "emprl_t5:consensus", "lempex:t5,consensus")


@pytest.fixture
def published(tmp_path, monkeypatch):
    """A random T5 in place of the wheel's, and adapters on it in bfloat16 in place of the published ones."""
    peft = pytest.importorskip("peft")
    base, weights = tmp_path / "base", tmp_path / "weights"
    tokenizer = train_bpe(TEXTS, vocab_size=300)
    tokenizer.backend.post_processor = processors.TemplateProcessing(
        single="$A </s>", special_tokens=[("</s>", tokenizer.eos_id)]
    )
    model = transformers.AutoModelForSeq2SeqLM.from_pretrained(saved(base, "t5", tokenizer, **WIDER["t5"]))
    settings = peft.LoraConfig(task_type="SEQ_2_SEQ_LM", r=3, target_modules="all-linear", init_lora_weights=False)
    peft.get_peft_model(model, settings).save_pretrained(weights)
    fields = json.loads((weights / "adapter_config.json").read_text())
    fields["base_model_name_or_path"] = FLAN_T5
    (weights / "adapter_config.json").write_text(json.dumps(fields))
    file = weights / "adapter_model.safetensors"
    rounded = {name: tensor.bfloat16() for name, tensor in safetensors.torch.load_file(file).items()}
    safetensors.torch.save_file(rounded, file)
    options = {"num_beams": 2, "max_new_tokens": 9, "decoder_start_token_id": 0, "eos_token_id": 1, "pad_token_id": 0}
    (weights / "generation_config.json").write_text(json.dumps(options))
    monkeypatch.setitem(NAMED, FLAN_T5, lambda: base)
    monkeypatch.setitem(NAMED, T5_REPLIES, lambda: weights)
    return base, weights


def greedy_text(model, tokenizer, text, *, prompt=None, **options):
    """The answer of a model of transformers."""
    ids = tokenizer(text, return_tensors="pt").input_ids if prompt is None else torch.tensor([prompt])
    with torch.no_grad():
        said = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=False, **options)[0]
    return tokenizer.decode(said if prompt is None else said[len(prompt) :], skip_special_tokens=True)


def adapted(base, weights, auto=transformers.AutoModelForSeq2SeqLM):
    """As the model card says: a folder of the wheel's model, and PEFT on it."""
    import peft

    return peft.PeftModel.from_pretrained(auto.from_pretrained(base), weights).eval()


@pytest.mark.oracle
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning")
def test_a_published_name_answers_as_transformers_with_peft_does(published, tmp_path):
    base, weights = published
    model = empax.load(T5_REPLIES)
    theirs, tokenizer = adapted(base, weights), transformers.AutoTokenizer.from_pretrained(base)
    targets = ["oh no", "I feel sad"]
    for text, target, nll in zip(TEXTS, targets, model.nll(TEXTS, targets).nll, strict=True):
        ids = tokenizer(text, return_tensors="pt").input_ids
        wanted = torch.tensor([[*tokenizer(target, add_special_tokens=False).input_ids, 1]])
        with torch.no_grad():
            loss = float(theirs(input_ids=ids, labels=wanted).loss)
        assert nll == pytest.approx(loss * wanted.shape[1], rel=1e-4)
    plain = empax.load(FLAN_T5)
    assert not np.allclose(plain.nll(TEXTS, targets).nll, model.nll(TEXTS, targets).nll, rtol=1e-2)
    greedy = {"num_beams": 1, "max_new_tokens": 9}
    said = [greedy_text(theirs, tokenizer, text, **greedy) for text in TEXTS]
    assert model.generate(TEXTS, **greedy) == said
    # Left open, it decodes as the folder says.
    assert model.generate(TEXTS) == model.generate(TEXTS, num_beams=2, max_new_tokens=9)
    model.save(tmp_path / "whole")
    whole = transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "whole").eval()
    assert [greedy_text(whole, tokenizer, text, **greedy) for text in TEXTS] == said


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning")
@pytest.mark.slow
def test_training_starts_from_a_published_name(published):
    model = empax.load(T5_REPLIES)
    tuned = model.finetune([("I feel sad today", "oh no")] * 4, epochs=1, batch_size=8, learning_rate=1e-3)
    one, other = (m.nll(TEXTS, TEXTS).nll.sum() for m in (model, tuned))
    assert one != other
    assert repr(tuned).startswith(f"TextModel({T5_REPLIES!r}, t5")


@pytest.mark.oracle
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning")
@pytest.mark.slow
def test_adapters_on_a_published_name_are_saved_with_those_beneath(published, tmp_path):
    tuned = empax.load(T5_REPLIES).finetune([("I feel sad today", "oh no")] * 4, lora=2, epochs=1, learning_rate=0.1)
    tuned.save(tmp_path / "adapters", format="peft")
    fields = json.loads((tmp_path / "adapters" / "adapter_config.json").read_text())
    assert (fields["r"], fields["base_model_name_or_path"]) == (3 + 2, str(published[0]))
    again = empax.load(tmp_path / "adapters")
    found, expected, before = (m.nll(TEXTS, TEXTS).nll for m in (again, tuned, empax.load(T5_REPLIES)))
    np.testing.assert_allclose(found, expected, rtol=1e-4)
    assert not np.allclose(before, expected, rtol=1e-2)
    theirs, tokenizer = (
        adapted(published[0], tmp_path / "adapters"),
        transformers.AutoTokenizer.from_pretrained(published[0]),
    )
    greedy = {"num_beams": 1, "max_new_tokens": 9}
    assert tuned.generate(TEXTS, **greedy) == [greedy_text(theirs, tokenizer, text, **greedy) for text in TEXTS]


def may_say_im_twice(tokenizer, size):
    ids = tokenizer.encode("I'm sorry to hear that. I'm sure it gets better.")
    several = list(zip(*(ids[i:] for i in range(size)), strict=False))
    return len(set(several)) == len(several)


def test_a_reply_of_the_t5_may_say_im_twice():
    tokenizer = load_tokenizer(THE_WHEEL())
    sizes = [load_recipe("reg_t5").reg.decoding.no_repeat_ngram]
    sizes.append(load_recipe(f"published:{T5_REPLIES}").seq2seq.decoding.no_repeat_ngram)
    sizes.append(json.loads((wheels.published_folder(T5_REPLIES) / FILE).read_text())["no_repeat_ngram_size"])
    sizes += [load_recipe(form).nec.decoding.no_repeat_ngram for form in ("nec", "nec:no_contrast")]
    sizes += [load_recipe(form).evaluate.decoding.no_repeat_ngram for form in CONSENSUS_OF_T5]
    assert all(may_say_im_twice(tokenizer, size) for size in sizes)
    assert not may_say_im_twice(tokenizer, 3)


def test_a_reply_in_the_words_of_bert_may_say_im_twice(minilm):
    assert may_say_im_twice(load_tokenizer(minilm), load_recipe("lempex:consensus").evaluate.decoding.no_repeat_ngram)
    assert load_recipe("nec:scratch,consensus").evaluate.decoding.no_repeat_ngram == 3


def test_recipes_take_published_names():
    assert load_recipe(f"finetune:{T5_REPLIES}").seq2seq.generator.pretrained == T5_REPLIES
    assert load_recipe(f"emprl_t5:{T5_REPLIES}").emprl.generator.pretrained == T5_REPLIES
    own, wheel = load_recipe(f"reg_t5:{T5_REPLIES}"), load_recipe("reg_t5")
    assert own.reg.generator.pretrained == own.prepare.tokenizer.pretrained == T5_REPLIES
    own.reg.generator.pretrained = own.prepare.tokenizer.pretrained = wheel.reg.generator.pretrained
    assert own == wheel  # sized for two cores as the wheel itself
    for recipe in ("reg_llm", "emprl_llm"):
        own, wheel = load_recipe(f"{recipe}:empathetic-smollm2"), load_recipe(recipe)
        assert own.prepare.tokenizer.pretrained == "empathetic-smollm2"
        assert own.generator == wheel.generator


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning")
def test_what_is_not_there_is_named(published, monkeypatch, tmp_path):
    monkeypatch.setitem(NAMED, FLAN_T5, THE_WHEEL)
    monkeypatch.setattr(wheels.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="run `pip install --no-deps traceforge-title-model`"):
        empax.load(T5_REPLIES)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match="or 'empathetic-t5-small' or 'empathetic-smollm2'"):
        empax.load("empathetic-t5-smal")
    monkeypatch.setattr(wheels, "__file__", str(tmp_path / "empax" / "data" / "wheels.py"))
    with pytest.raises(ConfigError, match="comes with empax, but not with this copy"):
        wheels.published_folder(T5_REPLIES)
    # In an installed package, and in a clone.
    for place in (tmp_path / "weights", tmp_path / "empax" / "weights"):
        shutil.rmtree(tmp_path / "weights", ignore_errors=True)
        (place / T5_REPLIES).mkdir(parents=True)
        assert wheels.published_folder(T5_REPLIES) == place / T5_REPLIES


def real(name):
    """The model by its name; skips where it, or what it sits on, is not there."""
    try:
        return empax.load(name)
    except ConfigError as error:
        pytest.skip(str(error))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "nll", "said"),
    [
        (T5_REPLIES, 22.1725, "That's great! What kind of exam did you pass?"),
        (SMOLLM2_REPLIES, 18.7491, "Congrats! What was the exam for?"),
    ],
)
def test_the_published_weights_say_what_they_said_when_they_were_published(name, nll, said):
    model = real(name)
    found = model.nll(["I lost my keys."], ["Oh no! Where did you last see them?"])
    assert found.nll[0] == pytest.approx(nll, rel=1e-3)
    assert model.reply("I passed my exam!") == said
    readme = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    assert name != T5_REPLIES or f"This prints `{said}`" in readme


@pytest.mark.oracle
@pytest.mark.parametrize("name", CASES)
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_the_published_weights_say_the_same_in_transformers_with_peft(name, tmp_path):
    ours, weights = real(name), wheels.published_folder(name)
    base = json.loads((weights / "adapter_config.json").read_text())["base_model_name_or_path"]
    empax.load(base).save(tmp_path / "base")
    seq2seq = name == T5_REPLIES
    auto = transformers.AutoModelForSeq2SeqLM if seq2seq else transformers.AutoModelForCausalLM
    theirs = adapted(tmp_path / "base", weights, auto)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "base")
    texts = [dialogue.utterances[0].text for dialogue in load_dialogues()["test"][:5]]
    greedy, said = {"num_beams": 1, "max_new_tokens": 30}, []
    for text in texts:
        prompt = None
        if not seq2seq:
            chat = [{"role": "user", "content": text}]
            prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
        said.append(greedy_text(theirs, tokenizer, text, prompt=prompt, **greedy))
    assert ours.generate(texts, **greedy, no_repeat_ngram_size=0, min_new_tokens=0) == said
