"""Random models in folders, as Hugging Face's are."""

import torch
import transformers

from empax.data.bpe import train_bpe

PAIRS = [("I feel sad today", "oh no"), ("what happened", "I feel sad")] * 4
LLAMA = {
    "hidden_size": 16, "num_attention_heads": 2, "num_key_value_heads": 2, "intermediate_size": 16,
    "num_hidden_layers": 1,
}  # fmt: skip
T5 = {"d_model": 16, "d_kv": 8, "num_heads": 2, "d_ff": 16, "num_layers": 1, "decoder_start_token_id": 0}
GPT2 = {"n_embd": 16, "n_head": 2, "n_layer": 1}
OPT = {"hidden_size": 16, "num_attention_heads": 2, "ffn_dim": 16, "num_hidden_layers": 1, "word_embed_proj_dim": 16}
BART = {"d_model": 16} | {
    f"{side}_{name}": value
    for side in ("encoder", "decoder")
    for name, value in (("layers", 1), ("attention_heads", 2), ("ffn_dim", 16))
}
NO_BART = {"dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0}
NO_GPT2 = {"resid_pdrop": 0.0, "attn_pdrop": 0.0, "embd_pdrop": 0.0}

# Model, sizes, and what makes it one without dropout; nothing = it has none by itself.
KINDS = {
    "llama": (transformers.LlamaForCausalLM, LLAMA, {}),
    "qwen2": (transformers.Qwen2ForCausalLM, LLAMA, {}),
    "qwen3": (transformers.Qwen3ForCausalLM, LLAMA | {"head_dim": 8}, {}),
    "mistral": (transformers.MistralForCausalLM, LLAMA, {}),
    "gpt2": (transformers.GPT2LMHeadModel, GPT2, NO_GPT2),
    "opt": (transformers.OPTForCausalLM, OPT, {"dropout": 0.0}),
    "t5": (transformers.T5ForConditionalGeneration, T5, {"dropout_rate": 0.0}),
    "mt5": (transformers.MT5ForConditionalGeneration, T5, {"dropout_rate": 0.0}),
    "bart": (transformers.BartForConditionalGeneration, BART, NO_BART),
    "blenderbot": (transformers.BlenderbotForConditionalGeneration, BART, NO_BART),
    "mbart": (transformers.MBartForConditionalGeneration, BART, NO_BART),
    "marian": (transformers.MarianMTModel, BART, NO_BART),
    "pegasus": (transformers.PegasusForConditionalGeneration, BART, NO_BART),
}

WIDER = {
    "t5": {"d_model": 24, "num_heads": 3, "d_ff": 32, "num_layers": 2},
    "bart": {
        "d_model": 24, "encoder_layers": 2, "encoder_attention_heads": 3, "encoder_ffn_dim": 32, "decoder_layers": 2,
        "decoder_attention_heads": 3, "decoder_ffn_dim": 32, "dropout": 0.0, "decoder_start_token_id": 1,
        "forced_eos_token_id": None,
    },
    "gpt2": {"n_embd": 24, "n_head": 3, "n_layer": 2},
    "llama": {
        "hidden_size": 24, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 32,
        "num_hidden_layers": 2,
    },
}  # fmt: skip
"""Sizes of models that can learn a few pairs."""


def saved(folder, kind, tokenizer=None, **fields):
    """A random model with its tokenizer, as transformers writes one."""
    tokenizer = tokenizer or train_bpe([text for pair in PAIRS for text in pair], vocab_size=300)
    model, sizes, _ = KINDS[kind]
    ids = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2, "decoder_start_token_id": 2}
    torch.manual_seed(0)
    made = model(model.config_class(vocab_size=tokenizer.vocab_size, **{**ids, **sizes, **fields}))
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if parameter.ndim > 1 and "embed_positions" not in name:
                parameter.copy_(0.4 * torch.randn_like(parameter))
    made.save_pretrained(folder)
    tokenizer.save(folder)
    return folder
