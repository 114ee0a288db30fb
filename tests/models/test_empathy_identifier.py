"""The empathy identifier against an independent PyTorch implementation: values, gradients, padding."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers

from empax.interop.parameters import export_params, import_params
from empax.models.bert import BertEncoder, bert_config
from empax.models.empathy_identifier import EmpathyIdentifier
from empax.models.heads import masked_max
from empax.models.t5 import T5Encoder, t5_config

VOCAB, WIDTH = 40, 12
MECHANISMS = ("interpretation", "exploration")


class Reader(torch.nn.Module):
    def __init__(self, pooling, head):
        super().__init__()
        self.pooling = pooling
        for name in ("query", "key", "value", "out"):
            setattr(self, name, torch.nn.Linear(WIDTH, WIDTH))
        self.hidden = torch.nn.Linear(WIDTH, WIDTH // 2) if head == "mlp" else None
        self.classify = torch.nn.Linear(WIDTH // 2 if head == "mlp" else WIDTH, 3)

    def forward(self, response, response_mask, context, context_mask):
        scores = self.query(response) @ self.key(context).transpose(1, 2) / math.sqrt(WIDTH)
        scores = scores.masked_fill(~context_mask[:, None, :], -torch.inf)
        states = response + self.out(torch.softmax(scores, dim=-1) @ self.value(context))
        if self.pooling == "max":
            pooled = states.masked_fill(~response_mask[:, :, None], -torch.inf).max(dim=1).values
        else:
            pooled = (states * response_mask[:, :, None]).sum(1) / response_mask.sum(1, keepdim=True)
        return self.classify(pooled if self.hidden is None else torch.tanh(self.hidden(pooled)))


class Identifier(torch.nn.Module):
    def __init__(self, pooling, head):
        super().__init__()
        config = transformers.BertConfig(
            vocab_size=VOCAB, hidden_size=WIDTH, num_attention_heads=3, intermediate_size=16, num_hidden_layers=2,
            max_position_embeddings=10, attn_implementation="eager",
        )  # fmt: skip
        self.context = transformers.BertModel(config, add_pooling_layer=False)
        self.response = transformers.BertModel(config, add_pooling_layer=False)
        self.readers = torch.nn.ModuleList([Reader(pooling, head) for _ in MECHANISMS])

    def forward(self, context, context_mask, response, response_mask):
        contexts = self.context(context, attention_mask=context_mask.long()).last_hidden_state
        responses = self.response(response, attention_mask=response_mask.long()).last_hidden_state
        return torch.stack([read(responses, response_mask, contexts, context_mask) for read in self.readers], dim=1)


def carried_over(model, config, array_of):
    """Our parameters out of `array_of` each of PyTorch's: its data, or its gradient."""

    def encoder(part):
        return import_params("bert", {name: array_of(tensor) for name, tensor in part.named_parameters()}, config)

    def reader(part):
        attention = {}
        for name in ("query", "key", "value", "out"):
            linear = getattr(part, name)
            shape = (1, WIDTH, WIDTH) if name == "out" else (WIDTH, 1, WIDTH)
            attention[name] = array_of(linear.weight).T.reshape(shape)
            attention[f"{name}_bias"] = array_of(linear.bias).reshape((WIDTH,) if name == "out" else (1, WIDTH))
        head = {"out": array_of(part.classify.weight).T, "out_bias": array_of(part.classify.bias)}
        if part.hidden is not None:
            head |= {"hidden": array_of(part.hidden.weight).T, "hidden_bias": array_of(part.hidden.bias)}
        return {"attention": attention, "head": head}

    readers = {name: reader(part) for name, part in zip(MECHANISMS, model.readers, strict=True)}
    return {"context_encoder": encoder(model.context), "response_encoder": encoder(model.response), **readers}


def texts(seed=1):
    """Ids and masks of contexts and responses, padded by different amounts."""
    rng = np.random.default_rng(seed)
    found = []
    for length, sizes in ((7, [7, 4, 2]), (5, [3, 5, 1])):
        found += [rng.integers(1, VOCAB, (3, length)), np.arange(length)[None] < np.array(sizes)[:, None]]
    return found


def made(config, pooling, head, dropout=0.0):
    encoder = BertEncoder(config)
    return EmpathyIdentifier(encoder, encoder.clone(), MECHANISMS, pooling=pooling, head=head, dropout=dropout)


@pytest.fixture(scope="module", params=[("mean", "mlp"), ("max", "linear")], ids="-".join)
def both(request):
    torch.manual_seed(0)
    model = Identifier(*request.param).eval()
    with torch.no_grad():
        for tensor in model.parameters():
            tensor.add_(0.2 * torch.randn(tensor.shape))
    for part in model.modules():
        if isinstance(part, torch.nn.Embedding):
            part.padding_idx = None  # or PyTorch drops the gradient of that row
    config = bert_config(model.context.config.to_dict())
    params = carried_over(model, config, lambda tensor: tensor.detach().numpy().copy())
    params = jax.tree.map(jnp.asarray, params)
    ours = made(config, *request.param)

    def loss(params, weights, *inputs):
        logits = ours.apply({"params": params}, *inputs)
        return jnp.sum(logits * weights), logits

    compiled = jax.jit(jax.value_and_grad(loss, has_aux=True))
    return model, config, params, lambda *inputs: compiled(*jax.tree.map(jnp.asarray, inputs))


@pytest.mark.oracle
def test_logits_and_gradients_match_torch(both):
    model, config, params, value_and_grad = both
    inputs = texts()
    weights = np.random.default_rng(2).normal(size=(3, len(MECHANISMS), 3)).astype(np.float32)
    expected = model(*map(torch.tensor, inputs))
    model.zero_grad()
    (expected * torch.tensor(weights)).sum().backward()
    (_, logits), grads = value_and_grad(params, weights, *inputs)
    np.testing.assert_allclose(logits, expected.detach().numpy(), rtol=1e-5, atol=3e-6)
    wanted = carried_over(model, config, lambda tensor: tensor.grad.numpy())
    leaves = jax.tree_util.tree_leaves_with_path(grads)
    assert len(leaves) == len(jax.tree.leaves(wanted))
    for (path, ours), theirs in zip(leaves, jax.tree.leaves(wanted), strict=True):
        scale = max(1.0, float(np.abs(theirs).max()))  # sums that cancel: rounding is relative to what was summed
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=5e-6 * scale, err_msg=str(path))
    # Both encoders and every mechanism learn.
    moved = {name: max(float(np.abs(leaf).max()) for leaf in jax.tree.leaves(part)) for name, part in grads.items()}
    assert min(moved.values()) > 1e-3
    assert (
        export_params("bert", params["context_encoder"], config).keys() == dict(model.context.named_parameters()).keys()
    )


def test_padding_and_filler_rows_change_nothing(both):
    _, _, params, value_and_grad = both
    context, context_mask, response, response_mask = texts()
    ones = np.ones((3, len(MECHANISMS), 3), np.float32)
    (_, expected), _ = value_and_grad(params, ones, context, context_mask, response, response_mask)
    other = np.where(context_mask, context, 9), context_mask, np.where(response_mask, response, 8), response_mask
    (_, logits), _ = value_and_grad(params, ones, *other)
    np.testing.assert_allclose(logits, expected, rtol=1e-5, atol=1e-6)
    without = context_mask.copy(), response_mask.copy()
    without[0][1], without[1][1] = False, False
    (_, logits), grads = value_and_grad(params, ones, context, without[0], response, without[1])
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(grads))
    np.testing.assert_allclose(np.asarray(logits)[[0, 2]], np.asarray(expected)[[0, 2]], rtol=1e-5, atol=1e-6)
    assert np.isfinite(logits[1]).all()


def test_dropout_acts_in_training_alone(both):
    model, config, params, _ = both
    ours = made(config, "mean", "mlp" if model.readers[0].hidden is not None else "linear", dropout=0.5)
    inputs = [jnp.asarray(array) for array in texts()]

    @jax.jit
    def logits(rng):
        return ours.apply({"params": params}, *inputs, deterministic=False, rngs={"dropout": rng})

    one, same, other = (np.asarray(logits(jax.random.key(seed))) for seed in (0, 0, 1))
    np.testing.assert_array_equal(one, same)
    assert np.abs(one - other).max() > 1e-2


def test_encoders_may_be_those_of_a_t5():
    fields = {"vocab_size": VOCAB, "d_model": WIDTH, "d_kv": 4, "d_ff": 16, "num_layers": 1, "num_heads": 2}
    encoder = T5Encoder(t5_config(fields))
    model = EmpathyIdentifier(encoder, encoder.clone(), MECHANISMS)
    logits, variables = jax.eval_shape(model.init_with_output, jax.random.key(0), *map(jnp.asarray, texts()))
    assert logits.shape == (3, len(MECHANISMS), 3)
    assert set(variables["params"]) == {"context_encoder", "response_encoder", *MECHANISMS}
    assert all("token_embedding" in variables["params"][f"{side}_encoder"] for side in ("context", "response"))


def test_masked_max_is_of_real_tokens_and_zero_of_none():
    states = jnp.asarray([[[-3.0, 1.0], [-2.0, -5.0], [9.0, 9.0]], [[1.0, 1.0]] * 3], jnp.bfloat16)
    mask = jnp.asarray([[True, True, False], [False] * 3])
    found = masked_max(states, mask)
    assert found.dtype == jnp.float32
    np.testing.assert_array_equal(found, [[-2.0, 1.0], [0.0, 0.0]])
