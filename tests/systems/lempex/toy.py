"""A LEMPEx of a few words: its parts, and a batch."""

import jax
import jax.numpy as jnp

from empax.core.types import MECHANISMS
from empax.data import features
from empax.decoding.settings import DecodeSettings
from empax.models.bert import BertConfig, BertEncoder
from empax.models.dual_encoder import DualEncoder
from empax.models.t5 import t5_from_scratch
from empax.models.transformer import EncoderDecoder
from empax.parts.attributes.classifier import Classifier, frame
from empax.parts.attributes.sentiment import SentimentRegressor
from empax.parts.generator.decoder import Decoder
from empax.systems.lempex.examples import LempexBatch
from empax.systems.lempex.exemplar_fusion import ExemplarFusion
from empax.systems.lempex.losses import EmpathyLosses
from empax.systems.lempex.settings import LempexTaskSettings
from empax.systems.lempex.tasks import LempexGenerator
from tests.systems.learning import random_like

V, PAD, EOS, CLS, SEP = 20, 0, 1, 2, 3
CONFIG = t5_from_scratch(
    V, d_model=16, num_heads=2, head_dim=8, d_ff=32, num_encoder_layers=1, num_decoder_layers=1, dropout=0.0,
    start_id=CLS,
)  # fmt: skip
MODEL = EncoderDecoder(CONFIG)
READER = DualEncoder(
    BertEncoder(BertConfig(V, d_model=12, num_heads=2, d_ff=16, num_layers=1, max_positions=32, dropout=0.0))
)
CLASSIFIER = Classifier(READER, MECHANISMS, ((1.0,) * 3,) * 3, sep_id=SEP)
REGRESSOR = SentimentRegressor(READER)
DECODER = Decoder(DecodeSettings(method="greedy", max_tokens=4), start_id=CLS, eos_id=EOS, pad_id=PAD)


class Words:
    """A tokenizer whose words are numbers."""

    pad_id, eos_id, start_id, cls_id, sep_id, vocab_size = PAD, EOS, CLS, CLS, SEP, V


def padded(rows, width):
    return jax.tree.map(jnp.asarray, features.pad(rows, width, PAD))


def make_batch(contexts, responses, *, levels=None, compounds=None, exemplars=None, other=None):
    """A batch of ids; without `levels` nothing is judged."""
    source, source_mask = padded(contexts, max(map(len, contexts)))
    target, target_mask = padded([[*response, EOS] for response in responses], max(map(len, responses)) + 1)
    rows = len(contexts)
    more = {}
    if levels is not None:
        framed = [frame(Words(), *pair, 32) for pair in zip(contexts, responses, strict=True)]
        judged = padded([row for row, _ in framed], max(len(row) for row, _ in framed))
        reply = padded([[CLS, *response, SEP] for response in responses], target.shape[1] + 1)
        more |= {
            "judged": judged[0], "judged_mask": judged[1],
            "judged_start": jnp.asarray([start for _, start in framed]), "reply": reply[0], "reply_mask": reply[1],
            "levels": jnp.asarray(levels), "compound": jnp.asarray(compounds, jnp.float32),
        }  # fmt: skip
    for name, texts in (("exemplar", exemplars), ("other", other)):
        if texts is not None:
            flat, mask = padded([text for row in texts for text in row], 4)
            shape = (rows, len(texts[0]), 4)
            more |= {name: flat.reshape(shape), f"{name}_mask": mask.reshape(shape)}
    return LempexBatch(
        source=source, source_mask=source_mask, target=target, target_mask=target_mask,
        valid=jnp.ones(rows, bool), emotion=jnp.full(rows, -1), speaker=jnp.where(source_mask, 1, 0), **more,
    )  # fmt: skip


def make_stage(**changes):
    return LempexTaskSettings(**{"losses": "judges", "judges": ("judges",), "sentiment": "sentiment"} | changes)


def make_losses(**changes):
    stage = make_stage(**changes)
    asked = stage.losses == "judges"
    return EmpathyLosses(stage, (("judges", CLASSIFIER),) if asked else (), REGRESSOR if asked else None)


def make_task(empathy=None, *, exemplars=False, speakers=False):
    fusion = ExemplarFusion(CONFIG) if exemplars else None
    return LempexGenerator(MODEL, DECODER, fusion, speakers=speakers, empathy=empathy)


def random_judges(losses, batch, seed=1):
    return random_like(jax.eval_shape(losses.init_judges, jax.random.key(0), batch), seed)
