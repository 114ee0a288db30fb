"""BARTScore: a BART's likelihood of a response given its context or its reference, and of the reference given it."""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from empax.core.config import ConfigError
from empax.core.progress import Progress
from empax.core.tree import hash_tree
from empax.core.types import Params, Prediction
from empax.data import features
from empax.data.batches import padded_lengths
from empax.data.tokenizer_folders import load_tokenizer
from empax.data.tokenizers import SubwordTokenizer
from empax.evaluation.rows import with_notes
from empax.evaluation.scoring import BART_DIRECTIONS
from empax.interop.huggingface import load_config, resolve
from empax.interop.pretrained import GeneratorSettings, check_weights, load_generator
from empax.losses.cross_entropy import token_log_probs
from empax.models.transformer import EncoderDecoder

_SHORTEST = 16
_ROWS_OF_TOKENS = 1024
"""Maximum number of target tokens in a batch, which bounds its logits."""


def check_bart(folder: str) -> None:
    """Checks that `folder` holds a BART.

    Raises:
      ConfigError: it holds no model, or one of another type.
      DataError: files are missing or broken.
    """
    found = load_config(resolve(folder))["model_type"]
    if found != "bart":
        raise ConfigError(f"bart_score = {folder!r} holds a {found!r}; BARTScore needs the folder of a BART.")
    check_weights(folder)


@dataclasses.dataclass(frozen=True)
class BartScorer:
    r"""Mean log-probability of a text's tokens given another text.

    .. math:: s(x \to y) = \frac{1}{|y|} \sum_t \log p(y_t | y_{<t}, x)

    The tokens of y include its frame, `<s>` and `</s>`, as in the authors' code. Source: Yuan et al. 2021 (BARTScore),
    Sec. 3.2, all weights equal.

    Attributes:
      hash: hash of the parameters.
    """

    model: EncoderDecoder
    params: Params
    tokenizer: SubwordTokenizer
    hash: str

    @classmethod
    def load(cls, folder: str) -> BartScorer:
        """Loads the BART in a folder; raises the errors of `check_bart`."""
        check_bart(folder)
        tokenizer = load_tokenizer(resolve(folder))
        found = load_generator(GeneratorSettings("bart", pretrained=folder), tokenizer)
        assert isinstance(found.model, EncoderDecoder)
        assert found.params is not None
        return cls(found.model, found.params, tokenizer, hash_tree(found.params))

    def __call__(self, sources: Sequence[str], targets: Sequence[str]) -> Float[np.ndarray, " N"]:
        """Returns s(source -> target) of each pair, at most 0; texts that are too long are truncated at the end."""
        pairs = list(zip(self._framed(sources), self._framed(targets), strict=True))
        groups: dict[tuple[int, int], list[int]] = collections.defaultdict(list)
        for number, (source, target) in enumerate(pairs):
            groups[self._level(source), self._level(target)].append(number)
        scores = np.zeros(len(pairs), np.float32)
        model: Any = self.model
        run = _mean_log_probs(model)
        with Progress("BARTScore", total=len(pairs), unit="texts") as progress:
            for (length, width), rows in sorted(groups.items(), reverse=True):
                height = max(1, _ROWS_OF_TOKENS // width)
                for start in range(0, len(rows), height):
                    own = rows[start : start + height]
                    filled = [pairs[i] for i in own] + [([], [])] * (height - len(own))
                    read = [
                        part
                        for side, size in zip(zip(*filled, strict=True), (length, width), strict=True)
                        for part in features.pad(list(side), size, self.tokenizer.pad_id)
                    ]
                    scores[own] = np.asarray(run(self.params, *read))[: len(own)]
                    progress.advance(len(own))
        return scores

    def _framed(self, texts: Sequence[str]) -> list[list[int]]:
        before, behind = self.tokenizer.framing
        room = self.model.config.max_positions - len(before) - len(behind)
        return [[*before, *ids[:room], *behind] for ids in self.tokenizer.encode_batch(texts)]

    def _level(self, ids: Sequence[int]) -> int:
        return padded_lengths(len(ids), least=_SHORTEST, most=self.model.config.max_positions)[-1]


@functools.lru_cache(maxsize=4)
def _mean_log_probs(model: Any) -> Any:
    """Returns the same function for the same model, so that its compiled code is reused."""

    @jax.jit
    def run(
        params: Params,
        source: Int[Array, "B S"],
        source_mask: Bool[Array, "B S"],
        target: Int[Array, "B T"],
        target_mask: Bool[Array, "B T"],
    ) -> Float[Array, " B"]:
        found: Any = token_log_probs(model.apply({"params": params}, source, source_mask, target), target)  # type: ignore[arg-type]
        total = jnp.sum(jnp.where(target_mask, found, 0.0), axis=1)
        return total / jnp.maximum(target_mask.sum(axis=1), 1)

    return run


def bart_scored(predictions: Sequence[Prediction], scorer: BartScorer) -> list[Prediction]:
    """Adds the scores of `BART_DIRECTIONS` to the predictions in the note "bart_score", and the model's hash."""
    contexts = [features.plain_context(row.context) for row in predictions]
    responses, references = [row.response for row in predictions], [row.reference for row in predictions]
    pairs = {
        "faithfulness": (contexts, responses),
        "precision": (references, responses),
        "recall": (responses, references),
    }
    columns = zip(*(scorer(*pairs[name]).tolist() for name in BART_DIRECTIONS), strict=True)
    scores = [{n: round(one, 5) for n, one in zip(BART_DIRECTIONS, row, strict=True)} for row in columns]
    return with_notes(predictions, {"bart_score": scores, "bart_score_model": [scorer.hash] * len(scores)})
