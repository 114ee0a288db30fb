"""Checkpoints of T5X: small ones, written with tensorstore as T5X lays them out, give what PyTorch gives."""

import gzip
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tensorstore
import torch

from empax.core.files import DataError
from empax.interop.huggingface import load_config, load_pretrained
from empax.interop.readers import open_tensors
from empax.models.transformer import EncoderDecoder
from tests.interop.tiny import VOCAB, tiny


def t5(version):
    gated = version == "1.1"
    feed = "gated-gelu" if gated else "relu"
    changes = {"feed_forward_proj": feed, "scale_decoder_outputs": not gated, "relative_attention_max_distance": 128}
    return tiny("t5", own_head=gated, **changes)


def arrays(model):
    """The parameters by the names and in the layout of t5x/examples/t5/network.py."""
    of = {name: value.detach().numpy() for name, value in model.state_dict().items()}
    made = {"token_embedder.embedding": of["shared.weight"]}
    if not np.array_equal(of["lm_head.weight"], of["shared.weight"]):
        made["decoder.logits_dense.kernel"] = of["lm_head.weight"].T
    for stack, layers in (("encoder", 2), ("decoder", 3)):
        theirs = f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
        made[f"{stack}.relpos_bias.rel_embedding"] = of[theirs].T
        made[f"{stack}.{stack}_norm.scale"] = of[f"{stack}.final_layer_norm.weight"]
        attention = {"attention": (0, "SelfAttention", "attention")}
        if stack == "decoder":
            attention = {
                "self_attention": (0, "SelfAttention", "self_attention"),
                "encoder_decoder_attention": (1, "EncDecAttention", "cross_attention"),
            }
        for i in range(layers):
            ours, block = f"{stack}.layers_{i}", f"{stack}.block.{i}.layer"
            for name, (place, module, norm) in attention.items():
                for projection in ("query", "key", "value", "out"):
                    weight = of[f"{block}.{place}.{module}.{projection[0]}.weight"]
                    made[f"{ours}.{name}.{projection}.kernel"] = weight.T
                made[f"{ours}.pre_{norm}_layer_norm.scale"] = of[f"{block}.{place}.layer_norm.weight"]
            last = f"{block}.{len(attention)}"
            made[f"{ours}.pre_mlp_layer_norm.scale"] = of[f"{last}.layer_norm.weight"]
            for name in ("wi", "wi_0", "wi_1", "wo"):
                if f"{last}.DenseReluDense.{name}.weight" in of:
                    made[f"{ours}.mlp.{name}.kernel"] = of[f"{last}.DenseReluDense.{name}.weight"].T
    return made


def write(folder, name, array, chunks=None):
    kind = "bfloat16" if array.dtype == jnp.bfloat16 else array.dtype.str
    chunks = chunks or [max(1, array.shape[0] // 2), *array.shape[1:]]
    spec = {
        "driver": "zarr",
        "kvstore": {"driver": "file", "path": str(folder / name)},
        "metadata": {"shape": array.shape, "chunks": chunks, "dtype": kind, "compressor": {"id": "gzip", "level": 1}},
    }
    tensorstore.open(spec, create=True).result().write(array).result()


def checkpoint(folder, model, dtype=np.float32):
    for name, array in arrays(model).items():
        write(folder, f"target.{name}", np.asarray(array, dtype))
    # The optimizer's are left alone.
    write(folder, "state.param_states.token_embedder.embedding.v_row", np.ones(3, np.float32))
    (folder / "checkpoint").write_bytes(b"\x80")
    return folder


@pytest.mark.oracle
@pytest.mark.parametrize("version", ["1.0", "1.1"])
def test_a_checkpoint_alone_gives_the_logits_of_pytorch(version, tmp_path):
    model = t5(version)
    folder = checkpoint(tmp_path / "checkpoint_1000", model)
    fields = load_config(folder)
    assert fields["feed_forward_proj"] == {"1.0": "relu", "1.1": "gated-gelu"}[version]
    _, config, params = load_pretrained(folder)
    rng = np.random.default_rng(0)
    source, target = (rng.integers(1, VOCAB, (3, length)) for length in (9, 6))
    with torch.no_grad():
        expected = model(torch.tensor(source), labels=torch.tensor(target)).logits.numpy()
    found = jax.jit(EncoderDecoder(config).apply)(
        {"params": params}, jnp.asarray(source), jnp.ones(source.shape, bool), jnp.asarray(target)
    )
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=3e-6 * np.abs(expected).max())


@pytest.fixture(scope="module")
def half(tmp_path_factory):
    return checkpoint(tmp_path_factory.mktemp("half"), t5("1.0"), jnp.bfloat16)


def test_half_precision_comes_as_it_is_stored(half):
    embedding = open_tensors(half)["shared.weight"]
    assert embedding.dtype == jnp.bfloat16
    expected = t5("1.0").shared.weight.detach().numpy()
    np.testing.assert_array_equal(np.asarray(embedding), np.asarray(expected, jnp.bfloat16))


def change(folder, **fields):
    file = folder / ".zarray"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda f: (f / "1.0").unlink(), "lacks the chunks 1.0;"),
        (lambda f: (f / "1.0").rename(f / "7.0"), "lacks the chunks 1.0;"),
        (lambda f: shutil.copy(f / "1.0", f / "7.0"), "has, besides its own, the chunks 7.0;"),
        (lambda f: (f / "0.0").write_bytes(b"no gzip"), "cannot be read"),
        (lambda f: (f / "0.0").write_bytes((f / "0.0").read_bytes()[:-9]), "not a whole compressed file"),
        (lambda f: (f / "0.0").write_bytes(gzip.compress(bytes(599))), "does not hold exactly 600 bytes"),
        (lambda f: (f / "0.0").write_bytes(gzip.compress(bytes(1 << 24))), "not a whole compressed file"),
        (lambda f: (f / ".zarray").unlink(), "is not a zarr array: it lacks"),
        (lambda f: (f / ".zarray").write_text('{"chunks": [1]}'), "sets zarr_format = None, shape = None"),
        (lambda f: change(f, shape=[2**62, 2**62]), "sets shape"),
        (lambda f: change(f, shape=[-1, 15]), "sets shape"),
        (lambda f: change(f, shape=[2**30, 15]), "asks for 107374183 chunks"),
        (lambda f: change(f, shape=[2**30, 15], chunks=[2**30, 15]), "lacks|has, besides"),
        (lambda f: change(f, chunks=[2**30, 15]), "sets chunks"),
        (lambda f: change(f, chunks=[0, 15]), "sets chunks"),
        (lambda f: change(f, chunks=[15]), "sets chunks"),
        (lambda f: change(f, dtype="|O"), r"sets dtype = \|O"),
        (lambda f: change(f, compressor={"id": "blosc"}), "sets compressor"),
        (lambda f: change(f, compressor=None), "sets compressor = None"),
        (lambda f: change(f, order="F", dimension_separator="/"), "sets order = F, dimension_separator = /"),
        (lambda f: change(f, attributes={"scale": 2}), "sets attributes"),
        (lambda f: f.rename(f.with_name("target.encoder.encoder.mlp.wo.kernel")), "with a name for every layer"),
        (lambda f: f.rename(f.with_name("target.encoder.layers_0.mlp.wx.kernel")), "with a name for every layer"),
    ],
)
def test_damage_and_other_models_are_named(damage, said, whole, tmp_path):
    folder = shutil.copytree(whole, tmp_path / "checkpoint_1000")
    damage(folder / "target.encoder.layers_0.attention.query.kernel")
    with pytest.raises(DataError, match=said):
        load_pretrained(folder)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return checkpoint(tmp_path_factory.mktemp("whole"), t5("1.0"))


def test_a_short_file_is_no_array_of_a_gigabyte(tmp_path):
    folder = tmp_path / "target.token_embedder.embedding"
    folder.mkdir()
    about = {"zarr_format": 2, "shape": [1 << 20, 256], "chunks": [1 << 20, 256], "dtype": "<f4", "order": "C"}
    (folder / ".zarray").write_text(json.dumps(about | {"compressor": {"id": "gzip"}, "fill_value": None}))
    (folder / "0.0").write_bytes(bytes(1 << 20))
    with pytest.raises(DataError, match="has 1048576 bytes of chunks, too few for 1073741824"):
        open_tensors(tmp_path)


def test_chunks_may_reach_beyond_the_array(tmp_path):
    array = np.random.default_rng(0).normal(size=(7, 5)).astype(np.float32)
    write(tmp_path, "target.token_embedder.embedding", array, chunks=[3, 2])
    found = open_tensors(tmp_path)["shared.weight"]
    assert (found.shape, found.dtype) == ((7, 5), np.float32)
    np.testing.assert_array_equal(found, array)


@pytest.mark.parametrize(("head", "gated", "scaled"), [(False, False, True), (False, True, True), (True, False, False)])
def test_logits_are_scaled_where_t5x_has_no_head(head, gated, scaled, whole, tmp_path):
    shutil.copytree(whole, tmp_path, dirs_exist_ok=True)
    if head:
        write(tmp_path, "target.decoder.logits_dense.kernel", np.ones((20, VOCAB), np.float32))
    if gated:
        shutil.copytree(tmp_path / "target.encoder.layers_0.mlp.wi.kernel",
                        tmp_path / "target.encoder.layers_0.mlp.wi_0.kernel")  # fmt: skip
    fields = load_config(tmp_path)
    assert (fields["tie_word_embeddings"], fields["scale_decoder_outputs"]) == (not head, scaled)
