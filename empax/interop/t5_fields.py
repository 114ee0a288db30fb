"""What `config.json` would say of a T5 that comes without one, from the shapes of its weights."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from empax.core.files import DataError
from empax.interop.tensors import Tensors
from empax.interop.tied_embeddings import has_own_head


def t5_fields(tensors: Tensors, where: Path, *, t5x: bool) -> dict[str, Any]:
    """The fields of the T5 whose weights are `tensors`, by Hugging Face's names.

    What no shape tells is as in all released ones: 128 as the largest relative distance, GELU in gated layers. Logits
    are scaled where T5X has no head of its own, as its network does it; elsewhere in v1.0, which is not gated.

    Args:
      tensors: see above.
      where: for messages.
      t5x: whether T5X wrote them.

    Raises:
      DataError: they are not those of a T5.
    """
    first = "encoder.block.0.layer.{}".format
    gated = f"{first(1)}.DenseReluDense.wi_0.weight" in tensors
    names = (
        "shared.weight",
        f"{first(0)}.SelfAttention.relative_attention_bias.weight",
        f"{first(0)}.SelfAttention.q.weight",
        f"{first(1)}.DenseReluDense.{'wi_0' if gated else 'wi'}.weight",
    )
    lacking = [
        name for name in names if name not in tensors or len(tensors[name].shape) != 2 or 0 in tensors[name].shape
    ]
    if lacking:
        raise DataError(f"{where} holds no T5: it lacks the matrices {', '.join(lacking)}.")
    (vocab_size, d_model), (buckets, heads), (keys, _), (d_ff, _) = (tensors[name].shape for name in names)
    return {
        "model_type": "t5",
        "vocab_size": vocab_size,
        "d_model": d_model,
        "d_kv": keys // heads,
        "d_ff": d_ff,
        "num_layers": _count(tensors, "encoder"),
        "num_decoder_layers": _count(tensors, "decoder"),
        "num_heads": heads,
        "relative_attention_num_buckets": buckets,
        "feed_forward_proj": "gated-gelu" if gated else "relu",
        "tie_word_embeddings": not has_own_head(tensors, "shared.weight"),
        "scale_decoder_outputs": "lm_head.weight" not in tensors if t5x else not gated,
        "decoder_start_token_id": 0,
        "pad_token_id": 0,
        "eos_token_id": 1,
    }


def _count(tensors: Tensors, stack: str) -> int:
    found = (re.match(rf"{stack}\.block\.([0-9]{{1,6}})\.", name) for name in tensors)
    return 1 + max((int(match[1]) for match in found if match), default=-1)
