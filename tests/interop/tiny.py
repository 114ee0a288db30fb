"""Tiny random models of transformers: one of each architecture, of sizes that do not divide each other."""

import inspect

import torch
import transformers

from tests.interop.oracle import perturbed

CLASSES = {
    **{
        name.lower(): f"{name}ForConditionalGeneration"
        for name in ("T5", "MT5", "Bart", "MBart", "Blenderbot", "Pegasus")
    },
    **{name.lower(): f"{name}ForCausalLM" for name in ("Llama", "Mistral", "Qwen2", "Qwen3", "OPT")},
    **{name.lower(): f"{name}Model" for name in ("Bert", "Roberta", "MPNet", "DistilBert", "Electra")},
    "xlm-roberta": "XLMRobertaModel",
    "dpr": "DPRContextEncoder",
    "marian": "MarianMTModel",
    "gpt2": "GPT2LMHeadModel",
}
VOCAB = 37
BERT = {"vocab_size": VOCAB, "hidden_size": 20, "num_attention_heads": 4, "intermediate_size": 27}
BERT |= {"num_hidden_layers": 2, "max_position_embeddings": 23, "attn_implementation": "eager"}
LLAMA = BERT | {"num_key_value_heads": 2, "head_dim": 6}
STACKS = {"attention_heads": 3, "ffn_dim": 26}
BART = {f"{stack}_{key}": size for stack in ("encoder", "decoder") for key, size in STACKS.items()}
BART |= {"encoder_layers": 2, "decoder_layers": 3, "attn_implementation": "eager"}
BART |= {"vocab_size": VOCAB, "d_model": 21, "max_position_embeddings": 19}
T5 = {"vocab_size": VOCAB, "d_model": 20, "d_kv": 5, "num_heads": 3, "d_ff": 28, "num_layers": 2}
T5 |= {"num_decoder_layers": 3, "decoder_start_token_id": 0}
T5 |= {"relative_attention_num_buckets": 8, "relative_attention_max_distance": 12}
GPT2 = {"vocab_size": VOCAB, "n_embd": 20, "n_head": 4, "n_layer": 2, "n_positions": 23}
GPT2 |= {"bos_token_id": 1, "eos_token_id": 1}
OPT = {"vocab_size": VOCAB, "hidden_size": 20, "num_attention_heads": 4, "num_hidden_layers": 2, "ffn_dim": 27}
DISTIL = {"vocab_size": VOCAB, "dim": 20, "n_heads": 4, "n_layers": 2, "hidden_dim": 27}
SIZES = {
    **dict.fromkeys(("t5", "mt5"), T5),
    **dict.fromkeys(("bart", "blenderbot", "pegasus"), BART),
    "mbart": BART | {"decoder_start_token_id": 2},
    "marian": BART | {"pad_token_id": VOCAB - 1, "decoder_start_token_id": VOCAB - 1, "eos_token_id": 0},
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3"), LLAMA),
    "gpt2": GPT2,
    "opt": OPT | {"max_position_embeddings": 23},
    "distilbert": DISTIL | {"max_position_embeddings": 23, "attn_implementation": "eager"},
    "electra": BERT | {"embedding_size": 14},
}
"""By `model_type`; of all others, those of BERT."""


def class_of(name):
    """The class of transformers for an architecture, or of that name."""
    return getattr(transformers, CLASSES.get(name, name))


def tiny(name, *, own_head=False, **changes):
    """A model of `class_of(name)`, perturbed; `own_head`: with one, whatever its config says of tied embeddings."""
    kind = class_of(name)
    torch.manual_seed(0)
    config = kind.config_class(**(SIZES.get(kind.config_class.model_type, BERT) | changes))
    without = {"add_pooling_layer": False} if "add_pooling_layer" in inspect.signature(kind).parameters else {}
    model = kind(config, **without)
    if own_head:
        embedding = model.get_input_embeddings().weight
        model.lm_head.weight = torch.nn.Parameter(0.3 * torch.randn(embedding.shape))
    return perturbed(model)
