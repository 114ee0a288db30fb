import json

import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
import torch
import transformers

from empax.core.config import ConfigError
from empax.core.files import DataError
from empax.data import sample
from empax.data.empathetic_dialogues import find_archive, read_dialogues
from empax.interop.huggingface import load_pretrained, resolve
from empax.interop.parameters import import_params
from empax.interop.readers import open_tensors
from empax.models.bert import BertEncoder, bert_config
from empax.models.dual_encoder import DualEncoder
from empax.models.t5 import t5_config
from tests.interop import oracle
from tests.interop.tiny import tiny

NUM_TEXTS = 100


def dialogue_texts(folder):
    """Utterances of EmpatheticDialogues' test split, each of another dialogue; without the data, of the sample."""
    if folder is None:
        dialogues = [dialogue for split in sample.load_dialogues().values() for dialogue in split]
    else:
        dialogues = list(read_dialogues(find_archive(folder), "test"))
    every = len(dialogues) // NUM_TEXTS
    return [d.utterances[i % len(d.utterances)].text for i, d in enumerate(dialogues[::every])][:NUM_TEXTS]


@pytest.mark.slow
@pytest.mark.oracle
def test_minilm_embeds_as_torch_does(minilm, real_data_if_any):
    folder, texts = minilm, dialogue_texts(real_data_if_any)
    assert len(set(texts)) == NUM_TEXTS
    pretrained = load_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    batch = tokenizer(texts, padding=True, return_tensors="np")
    mask = batch["attention_mask"].astype(bool)
    model = DualEncoder(BertEncoder(pretrained.config), normalize=True)
    params = {"params": {"encoder": pretrained.params}}
    ours = model.apply(params, jnp.asarray(batch["input_ids"]), jnp.asarray(mask))
    theirs = transformers.BertModel.from_pretrained(folder).eval()
    with torch.no_grad():
        inputs = torch.tensor(batch["input_ids"]), torch.tensor(batch["attention_mask"])
        states = theirs(inputs[0], attention_mask=inputs[1]).last_hidden_state.numpy()
    means = np.stack([row[real].mean(0) for row, real in zip(states, mask, strict=True)])
    means /= np.linalg.norm(means, axis=1, keepdims=True)
    assert np.sum(ours * means, axis=1).min() >= 0.99999
    np.testing.assert_allclose(ours, means, atol=2e-6)


def test_more_layers_than_the_checkpoint_has_is_an_error():
    model = tiny("bert")
    with pytest.raises(DataError, match=r"missing encoder\.layer\.2"):
        import_params("bert", oracle.tensors_of(model), bert_config(model.config.to_dict(), num_layers=3))


def test_half_precision_weights_become_float32(tmp_path):
    model = tiny("bert").to(torch.bfloat16)
    model.save_pretrained(tmp_path)
    params = load_pretrained(tmp_path).params
    expected = model.embeddings.word_embeddings.weight.float().detach().numpy()
    np.testing.assert_array_equal(params["token_embedding"], expected)
    assert params["token_embedding"].dtype == jnp.float32


def test_folder_errors_say_what_is_wrong(tmp_path):
    with pytest.raises(DataError, match="not a folder"):
        open_tensors(tmp_path / "absent")
    with pytest.raises(DataError, match=r"no config\.json"):
        load_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert"}))
    with pytest.raises(ConfigError, match="lacks vocab_size"):
        load_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(tiny("bert").config.to_json_string())
    with pytest.raises(DataError, match=r"holds no weights that are read here \(model\.safetensors"):
        load_pretrained(tmp_path)
    (tmp_path / "pytorch_model.bin").write_text("hello")
    with pytest.raises(DataError, match=r"not a file that torch\.save wrote"):
        load_pretrained(tmp_path)


@pytest.mark.parametrize("kept", [0, 4, 100, 0.9])
def test_truncated_file_is_a_data_error(tmp_path, kept):
    file = tmp_path / "model.safetensors"
    safetensors.numpy.save_file({"a": np.zeros(1000, np.float32)}, file)
    content = file.read_bytes()
    file.write_bytes(content[: int(kept * len(content)) if isinstance(kept, float) else kept])
    with pytest.raises(DataError, match=r"model\.safetensors is (not a whole|empty)"):
        open_tensors(tmp_path)


def test_resolve_takes_folders_and_says_how_to_go_on_offline(tmp_path, monkeypatch):
    assert resolve(str(tmp_path)) == tmp_path
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ConfigError, match="give the path of a folder"):
        resolve("nobody/no-such-model-here")
    with pytest.raises(ConfigError, match="give the path of a folder"):
        resolve("./not a folder")
    for name in ("tokenizer.json", "config.json", "model.safetensors"):
        (tmp_path / name).touch()
        with pytest.raises(ConfigError, match=rf"{name} is a file; give the folder that holds config\.json"):
            resolve(str(tmp_path / name))


def test_unknown_preset_names_the_known_ones():
    with pytest.raises(ConfigError, match="flan-t5-base"):
        t5_config("t5-enormous")
