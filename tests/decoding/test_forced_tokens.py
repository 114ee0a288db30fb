"""Search and forced tokens, through T5, BART and their kin, against Hugging Face's `generate`."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers

from empax.decoding.search import generate
from empax.decoding.settings import DecodeSettings, num_hypotheses
from empax.interop.architectures import ARCHITECTURES
from empax.interop.parameters import import_params
from empax.models.transformer import EncoderDecoder
from empax.parts.generator.decoder import Decoder
from tests.decoding.hugging_face import found_by
from tests.interop.tiny import class_of

VOCAB, LENGTH, BATCH = 61, 9, 12
IDS = {
    "bart": {"start": 2, "eos": 2, "pad": 1, "bos": 0},
    "blenderbot": {"start": 1, "eos": 2, "pad": 0, "bos": 1},
    "t5": {"start": 0, "eos": 1, "pad": 0, "bos": None},
    "mt5": {"start": 0, "eos": 1, "pad": 0, "bos": None},
    "mbart": {"start": 57, "eos": 2, "pad": 1, "bos": 0},  # from the code of a language
    "marian": {"start": VOCAB - 1, "eos": 0, "pad": VOCAB - 1, "bos": None},
    "pegasus": {"start": 0, "eos": 1, "pad": 0, "bos": None},
}

FORCED = {"first_token": 0, "end_at_limit": True}
CASES = [
    ("bart", DecodeSettings("beam", LENGTH, num_beams=4, length_penalty=2.0, no_repeat_ngram=3, **FORCED)),
    ("blenderbot", DecodeSettings("beam", LENGTH, min_tokens=2, num_beams=4, no_repeat_ngram=3)),
    ("mbart", DecodeSettings("beam", LENGTH, num_beams=3, first_token=58, end_at_limit=True)),  # as mBART-50 does
    ("t5", DecodeSettings("beam", LENGTH, num_beams=4, length_penalty=2.0)),
    ("t5", DecodeSettings("beam", LENGTH, min_tokens=2, num_beams=4, length_penalty=2.0, early_stopping=True)),
    ("t5", DecodeSettings("greedy", LENGTH, min_tokens=3, no_repeat_ngram=2)),
    ("mt5", DecodeSettings("beam", LENGTH, num_beams=2, length_penalty=0.6, no_repeat_ngram=3)),
]
CASES += [
    pytest.param(*case, marks=pytest.mark.slow)
    for case in (
        ("bart", DecodeSettings("greedy", LENGTH, no_repeat_ngram=2, **FORCED)),
        ("blenderbot", DecodeSettings("greedy", LENGTH, no_repeat_ngram=2, end_at_limit=True)),
        ("marian", DecodeSettings("beam", LENGTH, num_beams=3, no_repeat_ngram=3, end_at_limit=True)),
        ("mbart", DecodeSettings("greedy", LENGTH, no_repeat_ngram=2, end_at_limit=True)),
        ("marian", DecodeSettings("greedy", LENGTH, no_repeat_ngram=2, end_at_limit=True)),
        ("pegasus", DecodeSettings("greedy", LENGTH, no_repeat_ngram=2, end_at_limit=True)),
        ("pegasus", DecodeSettings("beam", LENGTH, num_beams=3, length_penalty=0.8, end_at_limit=True)),
    )
]


@functools.cache
def models(name):
    torch.manual_seed(0)
    ids = IDS[name]
    is_t5 = name in ("t5", "mt5")
    kind = class_of(name)
    if not is_t5:
        sizes = {"attention_heads": 3, "ffn_dim": 40, "layers": 2}
        both = {f"{stack}_{key}": value for key, value in sizes.items() for stack in ("encoder", "decoder")}
        both |= {"vocab_size": VOCAB, "d_model": 21, "max_position_embeddings": 16}
        both |= {"decoder_start_token_id": ids["start"], "eos_token_id": ids["eos"], "pad_token_id": ids["pad"]}
        theirs = kind(kind.config_class(**both, scale_embedding=name == "mbart")).eval()
    else:
        sizes = {"d_model": 20, "d_kv": 5, "d_ff": 40, "num_layers": 2, "num_heads": 3}
        sizes |= {"vocab_size": VOCAB, "decoder_start_token_id": 0, "relative_attention_num_buckets": 8}
        theirs = kind(kind.config_class(**sizes)).eval()
    size = theirs.config.d_model
    # Untied and scaled up, so that responses differ, do not repeat one token, and end.
    head = torch.randn(VOCAB, size) * {"t5": 2.0, "mt5": 0.8}.get(name, 2.0 * size**-0.5)
    theirs.lm_head.weight = torch.nn.Parameter(head)
    with torch.no_grad():
        for key, parameter in theirs.named_parameters():
            if parameter.ndim == 1:
                parameter.copy_(0.3 * torch.randn_like(parameter) + float("norm" in key and "weight" in key))
            elif parameter.requires_grad and not key.startswith("lm_head"):
                parameter.copy_(torch.randn_like(parameter) * parameter.shape[-1] ** -0.5 * 1.5)
        if not is_t5:
            for layer in theirs.model.decoder.layers:  # or all sources would have one response
                layer.encoder_attn.out_proj.weight.mul_(4.0)
            theirs.final_logits_bias.normal_().mul_(0.5)
        else:
            theirs.lm_head.weight[ids["eos"]] *= 2.0
    theirs.generation_config = transformers.GenerationConfig()  # or what a test leaves open would be the model's
    fields = theirs.config.to_dict()
    ours = ARCHITECTURES[name].config(fields, tie_embeddings=False)
    assert ours.start_id == ids["start"]
    params = import_params(name, {key: value.numpy() for key, value in theirs.state_dict().items()}, ours)
    return theirs, EncoderDecoder(ours), params


def prompts(pad, width=8):
    """Sources padded on the right, every third on the left."""
    rng = np.random.default_rng(0)
    source = rng.integers(3, VOCAB, (BATCH, width)).astype(np.int32)
    mask = np.arange(width)[None] < rng.integers(2, width + 1, (BATCH, 1))
    mask[::3] = mask[::3, ::-1]
    return np.where(mask, source, pad), mask


def decode_ours(name, settings, source, mask):
    _, model, params = models(name)
    decoder = Decoder(settings, *(IDS[name][kind] for kind in ("start", "eos", "pad")))
    return jax.jit(lambda *inputs: decoder(model, *inputs, jax.random.key(0)))(params, source, mask)


def decode_theirs(name, settings, source, mask):
    theirs, ids = models(name)[0], IDS[name]
    num = num_hypotheses(settings)
    beam = {"length_penalty": settings.length_penalty, "early_stopping": settings.early_stopping} if num > 1 else {}
    return found_by(
        theirs, source, mask, skip=1, num=num, new=LENGTH, eos=ids["eos"], pad=ids["pad"],
        max_length=1 + LENGTH, min_new_tokens=settings.min_tokens or None,
        no_repeat_ngram_size=settings.no_repeat_ngram or None, decoder_start_token_id=ids["start"],
        forced_bos_token_id=settings.first_token, forced_eos_token_id=ids["eos"] if settings.end_at_limit else None,
        **beam,
    )  # fmt: skip


@pytest.mark.oracle
@pytest.mark.parametrize(("name", "settings"), CASES, ids=lambda value: str(value)[:30])
def test_tokens_are_hugging_faces(name, settings):
    source, mask = prompts(IDS[name]["pad"])
    found = jax.tree.map(np.asarray, decode_ours(name, settings, source, mask))
    expected, scores = decode_theirs(name, settings, source, mask)
    np.testing.assert_array_equal(found.tokens, expected)
    if scores is not None:
        is_end = expected == IDS[name]["eos"]
        counted = np.where(is_end.any(-1), is_end.argmax(-1) + 1, LENGTH)
        np.testing.assert_allclose(found.log_probs / counted**settings.length_penalty, scores, rtol=1e-4, atol=1e-6)
    if settings.end_at_limit:
        assert (found.tokens[:, 0] == IDS[name]["eos"]).any(axis=-1).all()
        if settings.first_token is not None:
            assert (found.tokens[:, :, 0] == settings.first_token).all()
        assert (found.tokens[:, 0, -1] == IDS[name]["eos"]).any()  # some had to be ended
    assert len(np.unique(found.tokens[:, 0], axis=0)) > 2


def flat_step(tokens, cache):
    """Every token but the end is as likely as any other."""
    logits = jnp.zeros((*tokens.shape, 8)).at[..., 1].set(-jnp.inf)
    return logits, cache


def flat(settings, start_id=0):
    kinds = {"start_id": start_id, "eos_id": 1, "pad_id": 2}
    return generate(flat_step, None, batch_size=2, settings=settings, rng=jax.random.key(0), **kinds)


def test_sampling_takes_forced_tokens_as_certain():
    forced = {"first_token": 4, "end_at_limit": True}
    found = flat(DecodeSettings("sample", 5, num_samples=3, top_p=0.9, top_k=6, temperature=0.7, **forced))
    assert (found.tokens[:, :, 0] == 4).all()
    assert len(np.unique(found.tokens[1, :, 1:4], axis=0)) > 1
    assert (found.tokens[:, :, -1] == 1).all()
    np.testing.assert_allclose(found.log_probs, np.full((2, 3), 3 * np.log(1 / 7)), rtol=1e-5)


@pytest.mark.parametrize(
    ("start_id", "forced", "tokens"),
    [
        (0, {"first_token": 0, "end_at_limit": True}, [0, 2, 3, 1]),  # as no token may come twice, not even the start
        (0, {"first_token": 0}, [0, 2, 3, 4]),
        (1, {"end_at_limit": True}, [0, 2, 3, 1]),  # BART starts from the end token, which ends nothing there
    ],
)
def test_forcing_goes_before_forbidding(start_id, forced, tokens):
    found = flat(DecodeSettings("greedy", 4, min_tokens=4, no_repeat_ngram=1, **forced), start_id)
    assert found.tokens[0, 0].tolist() == tokens
    assert np.isfinite(found.log_probs).all()
