"""Tiny random models in folders, for the recipes of pretrained ones."""

from pathlib import Path
from typing import Any

import pytest

TEMPLATE = (
    "{% for message in messages %}{{ '<|start|>' + message['role'] + '\n' + message['content'] + '<|end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|start|>assistant\n' }}{% endif %}"
)


@pytest.fixture(scope="module")
def workdir(request: pytest.FixtureRequest, recipe: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of the recipe that a module names as its CONFIG, with every shape checked."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    recipe(folder, "--check", config=request.module.CONFIG)
    return folder


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Llama with a tokenizer and a chat template, as Hugging Face models come."""
    return write_model(
        tmp_path_factory.mktemp("llama"), "LlamaForCausalLM", TEMPLATE, hidden_size=32, intermediate_size=48,
        num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512,
        tie_word_embeddings=True,
    )  # fmt: skip


@pytest.fixture(scope="session")
def t5(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random T5 with a tokenizer, likewise."""
    return write_model(
        tmp_path_factory.mktemp("t5"), "T5ForConditionalGeneration", d_model=32, d_kv=16, d_ff=48, num_layers=2,
        num_heads=2, decoder_start_token_id=0, pad_token_id=0, eos_token_id=2,
    )  # fmt: skip


def write_model(folder: Path, name: str, template: str = "", **sizes: Any) -> Path:
    """Writes a random model of this class of transformers, with a tokenizer; gives the folder."""
    import torch
    import transformers

    write_tokenizer(folder, template)
    torch.manual_seed(0)
    made = getattr(transformers, name)
    made(made.config_class(vocab_size=384, **sizes)).save_pretrained(folder)
    return folder


def write_tokenizer(folder: Path, template: str = "") -> None:
    """Bytes and a few words."""
    # Not above: slow to import, and most tests here want neither.
    import transformers

    from tests.data.small_tokenizers import trained

    special = ["<|pad|>", "<|start|>", "<|end|>"]
    words = "somebody said i am so sad happy that you my dog a good answer what happened to the short warm sentences"
    backend = trained("BPE", [words + " " + words.title()] * 3, special, vocab_size=380)
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token=special[0], bos_token=special[1], eos_token=special[2]
    )
    if template:
        tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
