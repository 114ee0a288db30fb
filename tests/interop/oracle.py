"""What the tests against PyTorch share: weights away from their initial values, padding on both sides, comparison."""

import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from flax.traverse_util import unflatten_dict

from empax.core.tree import named_leaves
from empax.interop.parameters import export_params
from empax.models.decoder_only import DecoderOnly
from empax.models.lora import init_adapters
from empax.models.transformer import EncoderDecoder


def perturbed(model, seed=0):
    """`model` in inference mode, its weights away from the ones and zeros under which errors would hide."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {name: value for name, value in model.named_parameters() if value.requires_grad}
    tensors |= {name: value for name, value in model.named_buffers() if name == "final_logits_bias"}
    with torch.no_grad():
        for tensor in tensors.values():
            tensor.add_(0.1 * torch.randn(tensor.shape, generator=generator))
    for module in model.modules():
        if isinstance(module, torch.nn.Embedding):
            module.padding_idx = None  # or PyTorch drops the gradient of that row
    return model.eval()


def import_peft():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of its imports
        return pytest.importorskip("peft", reason="the oracle for adapters is not installed")


def loaded_by(kind, *arguments, **options):
    """What `from_pretrained` of a class of PEFT's gives; a missing or surplus key, of which it warns, is an error."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.simplefilter("ignore", FutureWarning)  # PEFT's calls of transformers
        return kind.from_pretrained(*arguments, **options)


def drawn_adapters(params, settings):
    """Our adapters on `params`, away from zero."""
    rng = np.random.default_rng(0)
    fresh = init_adapters(jax.random.key(0), params, settings)
    return jax.tree.map(lambda leaf: jnp.asarray(rng.normal(size=leaf.shape) * 0.1, jnp.float32), fresh)


def lora_of(model, folder, **settings):
    """PEFT's model on `model`, all that it trains away from zero, after it was saved in `folder`."""
    peft, generator = import_peft(), torch.Generator().manual_seed(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of its saving
        adapted = peft.get_peft_model(model, peft.LoraConfig(**({"r": 3, "lora_alpha": 5} | settings))).eval()
        with torch.no_grad():
            for parameter in adapted.parameters():
                if parameter.requires_grad:
                    parameter.add_(0.15 * torch.randn(parameter.shape, generator=generator))
        adapted.save_pretrained(folder)
    return adapted


def merged(adapted):
    """The weights of PEFT's model with its adapter merged into them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of embeddings that are tied no more
        return tensors_of(adapted.merge_and_unload())


def follow(message, names):
    """Runs the pieces of code that a message gives between backticks, where PEFT and transformers are at hand."""
    peft = import_peft()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scope = {name: getattr(transformers, name) for name in re.findall(r"AutoModel\w*", message)}
        scope |= {"PeftModel": peft.PeftModel, "torch": torch, **names}
        pieces = re.findall("`([^`]+)`", message)
        assert pieces
        for piece in pieces:
            exec(piece, scope)


def tensors_of(model):
    return {name: value.detach().numpy().copy() for name, value in model.state_dict().items()}


def gradients_of(model):
    return {name: value.grad.numpy() for name, value in model.named_parameters() if value.grad is not None}


def small_inputs():
    return np.random.default_rng(0).integers(2, 37, (2, 9))


def logits_of(config, params):
    """Ours for the inputs of `expected_of`."""
    ids = jnp.asarray(small_inputs())
    kind = EncoderDecoder if hasattr(config, "num_encoder_layers") else DecoderOnly
    more = (ids,) if kind is EncoderDecoder else ()
    return jax.jit(kind(config).apply)({"params": params}, ids, jnp.ones(ids.shape, bool), *more)


def expected_of(model):
    """PyTorch's logits of two rows that are ids of a vocabulary of 37."""
    ids = torch.tensor(small_inputs())
    if not model.config.is_encoder_decoder:
        return model(input_ids=ids).logits.detach().numpy()
    first = torch.full((2, 1), model.config.decoder_start_token_id)
    return model(input_ids=ids, decoder_input_ids=torch.cat([first, ids[:, :-1]], 1)).logits.detach().numpy()


def ids_and_mask(batch, length, vocab, *, pad, seed=1):
    """Rows padded on the right, on the left, and not at all; no real token has the id `pad`."""
    rng = np.random.default_rng(seed)
    ids = rng.integers(pad + 1, vocab, size=(batch, length))
    mask = np.ones((batch, length), bool)
    mask[0, length - 3 :] = False
    mask[1, :2] = False
    return np.where(mask, ids, pad), mask


def assert_same_weights(found, expected):
    """The tensors of `found` are those of `expected`, which may hold more."""
    for name, value in found.items():
        np.testing.assert_allclose(value, expected[name], rtol=1e-5, atol=1e-6, err_msg=name)


def assert_same_bytes(found, expected, *, surplus=False):
    """The leaves of `found` are those of `expected` to the bit; `surplus`: that may hold more."""
    found, expected = named_leaves(found), named_leaves(expected)
    assert found.keys() <= expected.keys() if surplus else found.keys() == expected.keys()
    for name, leaf in found.items():
        one, other = np.asarray(leaf), np.asarray(expected[name])
        assert (one.dtype, one.shape) == (other.dtype, other.shape), name
        assert one.tobytes() == other.tobytes(), name


def assert_close(value, expected, *, rtol=1e-5, err_msg=""):
    expected = np.asarray(expected)
    # Sums that cancel: rounding is relative to what was summed, so to the largest element.
    scale = max(1.0, float(np.abs(expected).max()))
    np.testing.assert_allclose(value, expected, rtol=rtol, atol=6e-6 * scale, err_msg=err_msg)


def assert_gradients_match(ours, theirs):
    for name, expected in theirs.items():
        if name.endswith(("key.bias", "k_proj.bias", "attn.k.bias")):
            # A key bias moves all logits of a query alike: its gradient is rounding.
            assert np.abs(ours[name]).max() < 2e-5 * max(1.0, max(np.abs(array).max() for array in theirs.values()))
        else:
            assert_close(ours[name], expected, err_msg=name)


def assert_generators_match(model, config, params, *, name, source, source_mask, target, frozen=frozenset()):
    """Logits of `target`, and gradients of a random sum of them, of an encoder-decoder and of ours.

    `frozen`: foreign names of what is no parameter in PyTorch. Returns our gradients by their foreign names.
    """
    weights = np.random.default_rng(3).normal(size=(*target.shape, config.vocab_size)).astype(np.float32)
    start = np.full((len(target), 1), config.start_id)
    model.zero_grad()
    output = model(
        input_ids=torch.tensor(source),
        attention_mask=torch.tensor(source_mask).long(),
        decoder_input_ids=torch.tensor(np.concatenate([start, target[:, :-1]], axis=1)),
    )
    (output.logits * torch.tensor(weights)).sum().backward()

    def loss(params):
        inputs = map(jnp.asarray, (source, source_mask, target))
        logits = EncoderDecoder(config).apply({"params": params}, *inputs)
        return jnp.sum(logits * weights), logits

    (_, logits), grads = jax.jit(jax.value_and_grad(loss, has_aux=True))(params)
    assert_close(logits, output.logits.detach().numpy())
    ours, theirs = export_params(name, grads, config), gradients_of(model)
    assert set(theirs) <= set(ours) <= set(theirs) | frozen
    assert_gradients_match(ours, theirs)
    return ours


def assert_encoders_match(inner, model, ours, config, params, *, name, pad, vocab, length):
    """States, and gradients of a random sum of them, of `model`, whose encoder is `inner`, and of our module `ours`.

    Returns what was read, ids and mask, and our states of it.
    """
    ids, mask = ids_and_mask(3, length, vocab, pad=pad)
    weights = np.random.default_rng(2).normal(size=(3, length, config.d_model)).astype(np.float32)
    weights *= mask[:, :, None]  # states of padding are numbers without meaning
    model.zero_grad()
    expected = inner(torch.tensor(ids), attention_mask=torch.tensor(mask).long()).last_hidden_state
    (expected * torch.tensor(weights)).sum().backward()

    def loss(params):
        states = ours.apply({"params": params}, jnp.asarray(ids), jnp.asarray(mask))
        return jnp.sum(states * weights), states

    (_, states), grads = jax.jit(jax.value_and_grad(loss, has_aux=True))(params)
    assert_close(states[mask], expected.detach().numpy()[mask])
    found, wanted = export_params(name, grads, config), gradients_of(model)
    assert set(found) == set(wanted)
    assert_gradients_match(found, wanted)
    return ids, mask, states


# Modules whose one parameter the Flax models called "weight", as PyTorch does: norms without a bias.
_KEPT_WEIGHT = {"t5": r"layer_norm$", "mt5": r"layer_norm$", "llama": r"(layernorm|norm)$"}


def flax_tree(model):
    """The parameters as the Flax class of Transformers 4 named and laid them out.

    Dense layers, GPT-2's `FlaxConv1D` too, had a `kernel`, the transpose of PyTorch's `weight`; `nn.Embed` an
    `embedding`; `nn.LayerNorm` a `scale` and a `bias`; the root-mean-square norms of T5 and Llama a `weight`. Of what
    is tied there was one copy. Masks and rotations were no parameters.
    """
    kind = model.config.model_type
    modules, flat = dict(model.named_modules()), {}
    for name, value in model.named_parameters():  # of tied ones, the first alone
        if not value.requires_grad:
            continue  # the sines and cosines of Marian and Pegasus
        *path, last = name.split(".")
        module = modules[".".join(path)]
        if isinstance(module, (torch.nn.Linear, transformers.pytorch_utils.Conv1D)) and last == "weight":
            value, last = value.T, "kernel"
        elif isinstance(module, torch.nn.Embedding):
            last = "embedding"
        elif last == "weight" and not re.search(_KEPT_WEIGHT.get(kind, "^$"), path[-1]):
            last = "scale"
        flat[(*path, last)] = value.detach().numpy()
    for name, value in model.named_buffers():
        if name == "final_logits_bias":
            flat["final_logits_bias",] = value.numpy()
    return unflatten_dict(flat)
