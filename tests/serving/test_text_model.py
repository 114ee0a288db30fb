"""The Python front door on models of Hugging Face: load, generate, score, embed, fine-tune, save."""

import dataclasses
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import peft
import pytest
import torch
import transformers
from tokenizers import processors

import empax
from empax.data.bpe import train_bpe
from empax.serving import answering
from empax.serving.safety import ANSWER
from tests.serving.models import WIDER, saved

TEXTS = ["I feel sad today", "oh no what happened to you", "no"]
PAIRS = [("I feel sad today", "oh no"), ("what happened to you", "I feel sad")] * 10
TEMPLATE = "{% for m in messages %}<s>{{ m['role'] }} {{ m['content'] }}</s>{% endfor %}{% if add_generation_prompt %}<s>bot {% endif %}"  # noqa: E501


@pytest.fixture(scope="module")
def folder(tmp_path_factory, request):
    """A folder as Hugging Face's are: the random model, and a tokenizer that frames texts as the family's does."""
    kind = request.param
    path = tmp_path_factory.mktemp(kind)
    tokenizer = train_bpe(TEXTS, vocab_size=300)
    if kind in ("t5", "bart"):
        single = {"t5": "$A </s>", "bart": "<s> $A </s>"}[kind]
        tokenizer.backend.post_processor = processors.TemplateProcessing(
            single=single, special_tokens=[("</s>", tokenizer.eos_id), ("<s>", tokenizer.start_id)]
        )
    if kind == "llama":
        tokenizer.chat_template = TEMPLATE
    return kind, saved(path, kind, tokenizer, **WIDER[kind])


# A second kind of each sort is in test-slow: what differs between them is tested in interop.
every_kind = pytest.mark.parametrize(
    "folder",
    ["t5", pytest.param("bart", marks=pytest.mark.slow), pytest.param("gpt2", marks=pytest.mark.slow), "llama"],
    indirect=True,
)


def theirs(folder):
    """transformers' model and tokenizer."""
    kind, path = folder
    auto = transformers.AutoModelForSeq2SeqLM if kind in ("t5", "bart") else transformers.AutoModelForCausalLM
    return auto.from_pretrained(path).eval(), transformers.AutoTokenizer.from_pretrained(path)


def source_ids(kind, tokenizer, *turns):
    """The source of one text, or of several turns, as a user of transformers makes it."""
    if kind == "llama":
        roles = [{"role": ("user", "assistant")[i % 2], "content": turn} for i, turn in enumerate(turns)]
        chat = tokenizer.apply_chat_template(roles, add_generation_prompt=True)
        return torch.tensor([chat if isinstance(chat, list) else chat["input_ids"]])
    return tokenizer(" | ".join(turns), return_tensors="pt").input_ids  # its tokenizer knows no end of a line


def text_behind(tokenizer, prompt, ids):
    """What `ids` add to the text of a prompt, with the blank between them."""
    before, whole = (tokenizer.decode(row, skip_special_tokens=True) for row in (prompt, [*prompt, *ids.tolist()]))
    assert whole.startswith(before)
    return whole.removeprefix(before)


@every_kind
def test_it_generates_what_transformers_does_and_knows_how_likely_it_was(folder):
    kind, path = folder
    model, tokenizer = theirs(folder)
    ours = empax.load(path)
    found = ours.generate(TEXTS, max_tokens=8, batch_size=2)
    choosy = ours.generate(TEXTS, max_tokens=8, batch_size=2, repetition_penalty=1.8, no_repeat_ngram=2)
    assert choosy != found
    targets, nlls = ["oh no", "sad today", "you"], []
    for text, answer, other, target in zip(TEXTS, found, choosy, targets, strict=True):
        ids = source_ids(kind, tokenizer, text)
        with torch.no_grad():
            said = model.generate(ids, do_sample=False, num_beams=1, max_new_tokens=8)[0]
            rare = model.generate(ids, max_new_tokens=8, repetition_penalty=1.8, no_repeat_ngram_size=2)[0]
            # Not the tokenizer's own call, which frames a text.
            wanted = torch.tensor([[*tokenizer(target, add_special_tokens=False).input_ids, 1]])
            if kind in ("t5", "bart"):
                nlls.append(float(model(input_ids=ids, labels=wanted).loss) * wanted.shape[1])
                said, rare = said[1:], rare[1:]
            else:
                logits = model(torch.cat([ids, wanted], dim=1)).logits[0, ids.shape[1] - 1 : -1]
                nlls.append(float(torch.nn.functional.cross_entropy(logits, wanted[0], reduction="sum")))
                said, rare = said[ids.shape[1] :], rare[ids.shape[1] :]
        prompt = ids[0].tolist() if kind == "gpt2" else []
        assert answer == text_behind(tokenizer, prompt, said)
        assert other == text_behind(tokenizer, prompt, rare)
    likelihoods = ours.nll(TEXTS, targets)
    np.testing.assert_allclose(likelihoods.nll, nlls, rtol=2e-4)
    assert likelihoods.perplexity == pytest.approx(np.exp(sum(nlls) / likelihoods.num_tokens.sum()), rel=1e-3)


def test_a_target_begins_with_the_token_that_decoding_forces(tmp_path):
    tokenizer = train_bpe(TEXTS, vocab_size=300)
    path = saved(tmp_path, "bart", tokenizer, **WIDER["bart"])
    (path / "generation_config.json").write_text('{"forced_bos_token_id": 2, "decoder_start_token_id": 1}')
    ours = empax.load(path)
    target = [2, *tokenizer.encode("oh no"), 1]
    (row,) = ours.generator.examples([("no", "oh no")]).targets
    assert (row, ours.generator.call({}).settings.first_token) == (target, 2)
    model = transformers.AutoModelForSeq2SeqLM.from_pretrained(path).eval()
    ids = torch.tensor([[*tokenizer.framing[0], *tokenizer.encode("no"), *tokenizer.framing[1]]])
    with torch.no_grad():
        wanted = float(model(input_ids=ids, labels=torch.tensor([target])).loss) * len(target)
    assert ours.nll(["no"], ["oh no"]).nll[0] == pytest.approx(wanted, rel=2e-4)


TURNS = ["I feel sad today", "oh no what happened", "you"]


@pytest.mark.parametrize("folder", ["t5", "llama"], indirect=True)
def test_it_replies_to_turns_as_a_chat_or_with_bars(folder):
    kind, path = folder
    model, tokenizer = theirs(folder)
    ours = empax.load(path)
    options = {"num_beams": 1, "max_new_tokens": 8, "before": None}
    for turns in (TURNS, TURNS[2:]):
        ids = source_ids(kind, tokenizer, *turns)
        with torch.no_grad():
            said = model.generate(ids, do_sample=False, num_beams=1, max_new_tokens=8)[0]
        said = said[ids.shape[1] :] if kind == "llama" else said[1:]
        assert ours.reply(turns, **options) == tokenizer.decode(said, skip_special_tokens=True).strip()
        newest = ours.reply(iter([" no ", "oh no", *turns]), max_source_tokens=ids.shape[1], **options)
        assert newest == ours.reply(turns, **options)  # older ones are left out, two at a time
    assert ours.reply(TURNS[0], **options) == ours.reply(TURNS[:1], **options)
    assert ours.reply(TURNS, **options) != ours.reply(TURNS[2:], **options)


@pytest.mark.parametrize("folder", ["llama"], indirect=True)
def test_a_reply_may_begin_and_end_as_the_turns_before_it(folder, monkeypatch):
    model, counted = empax.load(folder[1]), []

    def ends(task, params, batch, *_):
        counted.append(task.decoder.counts_prompt)
        return np.ones((len(batch.source), 1, 1), np.int32)

    monkeypatch.setattr(answering, "answers_of", ends)
    model.reply(TURNS, before=None, no_repeat_ngram_size=3)
    model.generate(TEXTS[:1], no_repeat_ngram_size=3)
    assert counted == [False, True]  # `generate` does as transformers


@pytest.mark.parametrize("folder", ["t5"], indirect=True)
def test_a_reply_to_danger_is_no_models_and_what_is_no_conversation_is_named(folder):
    model = empax.load(folder[1])
    assert model.reply(["Hello.", "Hi!", "I want to kill myself."]) == ANSWER
    assert model.reply(["no"], before=lambda text: f"<{text}>") == "<no>"
    plain = model.reply(["no"], before=lambda text: None, max_tokens=3)
    assert plain == model.generate(["no"], max_tokens=3)[0].strip()
    for turns, message in (
        (None, "turns is None"),
        (["no", 3], r"turns\[1\] is 3, a int"),
        ([" "], "nothing to answer"),
    ):
        with pytest.raises(empax.ConfigError, match=message):
            model.reply(turns)
    with pytest.raises(empax.ConfigError, match="gives one answer, but num_return_sequences = 2 asks for more"):
        model.reply(["no"], num_beams=2, num_return_sequences=2)


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning")  # of PEFT itself
@pytest.mark.parametrize(
    "folder",
    ["t5", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("bart", "gpt2", "llama"))],
    indirect=True,
)
def test_lora_in_five_lines_and_peft_reads_its_adapters(folder, tmp_path):
    kind, path = folder
    model = empax.load(path)
    tuned = model.finetune(PAIRS, lora=4, epochs=6, batch_size=8, learning_rate=2e-2)
    tuned.save(tmp_path / "adapters", format="peft")
    before, after = (m.nll(*zip(*PAIRS[:2], strict=True)).nll.sum() for m in (model, tuned))
    assert after < 0.9 * before
    base, tokenizer = theirs(folder)
    adapted = peft.PeftModel.from_pretrained(base, tmp_path / "adapters").eval()
    ids = source_ids(kind, tokenizer, TEXTS[0])
    with torch.no_grad():
        said = adapted.generate(input_ids=ids, do_sample=False, num_beams=1, max_new_tokens=6)[0]
    said = said[1:] if kind in ("t5", "bart") else said[ids.shape[1] :]
    assert tuned.generate(TEXTS[:1], max_tokens=6) == [tuned.tokenizer.decode(said.tolist())]


@pytest.mark.slow
@pytest.mark.parametrize("folder", ["t5"], indirect=True)
def test_a_whole_model_learns_and_is_the_same_when_saved_and_loaded(folder, tmp_path):
    model = empax.load(folder[1])
    tuned = model.finetune(PAIRS, validation=PAIRS[:2], epochs=2, learning_rate=1e-2, workdir=tmp_path / "run")
    assert (tmp_path / "run" / "metrics.jsonl").is_file()
    tuned.save(tmp_path / "saved")
    again = empax.load(tmp_path / "saved")
    one, two = (m.nll(TEXTS, TEXTS).nll for m in (tuned, again))
    np.testing.assert_allclose(one, two, rtol=1e-6)
    assert not np.allclose(one, model.nll(TEXTS, TEXTS).nll, rtol=1e-2)
    with pytest.raises(empax.ConfigError, match="has none: finetune"):
        tuned.save(tmp_path / "adapters", format="peft")
    same = {"epochs": 2, "learning_rate": 1e-2, "workdir": tmp_path / "run"}
    with pytest.raises(empax.ConfigError, match="holds a fine-tuning on other pairs"):
        model.finetune(PAIRS[:8], validation=PAIRS[:2], **same)


@pytest.mark.slow
@pytest.mark.parametrize("folder", ["t5"], indirect=True)
def test_adapters_on_weights_that_no_folder_holds_are_not_written_alone(folder, tmp_path):
    model = empax.load(folder[1])
    elsewhere = dataclasses.replace(model, trained=True)  # as `finetune` leaves it
    again = elsewhere.finetune(PAIRS[:8], validation=[("I feel sad today " * 9, "no")], lora=True, epochs=1)
    with pytest.raises(empax.ConfigError, match="save that model and load it before"):
        again.save(tmp_path / "adapters", format="peft")
    again.save(tmp_path / "whole")
    later = empax.load(tmp_path / "whole")
    assert not later.trained


@pytest.mark.parametrize("folder", ["t5"], indirect=True)
def test_an_encoder_decoder_embeds_by_the_mean_of_its_encoder(folder):
    found = empax.load(folder[1]).embed(TEXTS, batch_size=2)
    their_model, tokenizer = theirs(folder)
    with torch.no_grad():
        for vector, text in zip(found, TEXTS, strict=True):
            states = their_model.encoder(tokenizer(text, return_tensors="pt").input_ids).last_hidden_state
            np.testing.assert_allclose(vector, states[0].mean(0), atol=1e-5)


@pytest.mark.parametrize("folder", ["gpt2"], indirect=True)
def test_what_cannot_be_is_said(folder):
    model = empax.load(folder[1])
    for call, message in (
        (lambda: model.generate(TEXTS, max_token=3), r"max_token.*max_tokens"),
        (lambda: model.generate(TEXTS, max_tokens=1020), r"its answer included; .* has 1024: shorten it"),
        (lambda: model.nll(TEXTS, TEXTS[:1]), "one for each"),
        (lambda: model.embed(TEXTS), "embeds no texts"),
        (lambda: model.save("nowhere", format="gguf"), "'peft'"),
        (lambda: model.save(""), "folder = '' must be the path of a folder"),
        (lambda: model.save(None), "folder = None must be the path of a folder"),
        (lambda: empax.load(""), "name = '' names no model; give a folder"),
        (lambda: empax.load(folder[1], dtype="float16"), "dtype = 'float16' must be float32 or bfloat16"),
    ):
        with pytest.raises(empax.ConfigError, match=message):
            call()
    assert model.generate([]) == []
    assert np.isnan(model.nll([], []).perplexity)


def test_an_encoder_computes_in_a_type_that_is_named(minilm):
    with pytest.raises(empax.ConfigError, match="dtype = 'bf16' is not allowed; it takes one of 'float32', 'bfloat16'"):
        empax.load(minilm, dtype="bf16")


def test_a_run_that_trained_a_retriever_last_is_no_model_of_texts(tmp_path, monkeypatch):
    found = SimpleNamespace(what="retriever", model=object(), passages=0)
    monkeypatch.setattr("empax.serving.export.trained_model", lambda workdir: found)
    (tmp_path / "run.json").write_text("{}")
    with pytest.raises(empax.ConfigError, match="trained a retriever last, which generates no text"):
        empax.load(tmp_path)


def test_importing_brings_no_model_library():
    program = (
        "import sys, empax\n"
        "assert not {'jax', 'flax', 'transformers', 'numpy'} & set(sys.modules), 'imported too early'\n"
        "missing = [name for name in empax.__all__ if not hasattr(empax, name)]\n"
        "assert not missing, missing\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=300)


def test_what_loads_a_model_waits_for_nothing_that_trains_or_evaluates():
    slow = {"grain", "orbax", "optax", "tensorflow_datasets", "scipy", "nltk", "transformers", "scann", "sklearn"}
    program = f"import sys, empax; empax.load, empax.TextModel; print({slow} & set(sys.modules) or 'none of them')"
    ran = subprocess.run([sys.executable, "-c", program], check=True, timeout=300, capture_output=True, text=True)
    assert ran.stdout == "none of them\n"


@pytest.mark.slow
@pytest.mark.parametrize("folder", ["t5"], indirect=True)
@pytest.mark.parametrize("page", ["README.md", "docs/python.md"])
def test_the_examples_of_the_documents_run(page, folder, tmp_path, monkeypatch, capsys):
    text = (Path(__file__).parents[2] / page).read_text(encoding="utf-8")
    program = "\n".join(re.findall(r"```python\n(.*?)```", text, re.DOTALL))
    assert "empax.load(" in program
    monkeypatch.chdir(tmp_path)
    for name in ("flan-t5-small-titles", "empathetic-t5-small"):
        program = program.replace(f'"{name}"', repr(str(folder[1])))
    exec(program, {})
    assert list(tmp_path.glob("*/*.safetensors"))
    assert capsys.readouterr().out
