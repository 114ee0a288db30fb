"""What the floors expect of each other. Structural types: nothing inherits from these."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import jax
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from empax.core.types import AnyBatch, Instance, Mean, Metrics, Params, Prediction


@runtime_checkable
class Task(Protocol):
    """What can be trained. `frozen` (teacher, reference, scorers) is an argument, never a closure."""

    def init(self, rng: jax.Array, batch: AnyBatch) -> Params: ...

    def loss(
        self, params: Params, frozen: Params, batch: AnyBatch, rng: jax.Array, *, train: bool
    ) -> tuple[Mean, Metrics]:
        """The loss to minimise and what to log; dropout where `train`.

        Whatever is drawn is drawn by `rng`: in an evaluation, from the run's seed and the number of the batch.
        """
        ...


@runtime_checkable
class OnlineTask(Task, Protocol):
    def explore(self, params: Params, frozen: Params, batch: AnyBatch, rng: jax.Array) -> AnyBatch:
        """What the current model must try out before it can learn from `batch`; no gradient flows."""
        ...


@runtime_checkable
class ReinforcedTask(Task, Protocol):
    """What learns from rated answers of its own, several updates from each batch of them.

    One iteration: `rollout`, `rate`, `credit`, then `loss` on mini-batches of what `credit` gave. `rollout` finds the
    parameters that training began with, if an earlier stage trained them, in `frozen["reference"]`.
    """

    rates_on_host: bool
    """Whether `rate` is plain Python; else it is compiled with the rest."""

    def learns_from(self, name: str) -> int:
        """The batch, from 0, from which the parameter of that name learns; before, it stays as it is."""
        ...

    def init_memory(self) -> Any:
        """What goes from iteration to iteration and is no parameter (a controller, running statistics): a pytree."""
        ...

    def rollout(self, params: Params, frozen: Params, batch: AnyBatch, rng: jax.Array) -> AnyBatch:
        """The batch with answers of the current model, as many rows per example as it draws; compiled."""
        ...

    def rate(self, frozen: Params, batch: AnyBatch) -> AnyBatch:
        """The batch with a score for each answer."""
        ...

    def credit(self, frozen: Params, batch: AnyBatch, memory: Any) -> tuple[AnyBatch, Any, Metrics]:
        """Which token deserves what; the new memory; what to log of the iteration. Compiled."""
        ...

    def check_start(self, metrics: Mapping[str, float], *, step: int) -> None:
        """Looks at the metrics of `loss` on the first answers of a process, before they are learnt from.

        Args:
          metrics: averages.
          step: batches that have been learnt from; 0 = the model is still the one that training began with.

        Raises:
          TrainingError: the numbers cannot be right.
        """
        ...

    def check_progress(self, metrics: Mapping[str, float], *, step: int) -> None:
        """Looks at the averages of a logged row; warns, or raises TrainingError."""
        ...


@runtime_checkable
class SummarizingTask(Task, Protocol):
    def summarize(self, averages: dict[str, float]) -> dict[str, float]:
        """The metrics of an evaluation, from their averages over all of it: for metrics that are no mean (F1)."""
        ...


@runtime_checkable
class Examples(Protocol):
    """Tokenised examples with random access: what batches are cut from.

    `lengths[N]` is each example's source length in tokens, the bucketing key; or `lengths[N, 2]`, source and target:
    then a bucket's batches hold targets of like length. Where they change while training, `order_lengths` does not.
    """

    lengths: np.ndarray

    def __len__(self) -> int: ...

    def collate(self, indices: np.ndarray, length: int, rng: np.random.Generator) -> AnyBatch:
        """Rows `indices[B]` (-1 = filler) as a batch of numpy arrays, sources padded to `length` tokens."""
        ...


@runtime_checkable
class InstanceEncoder(Protocol):
    """Instances to vectors of an index (`retrieval.encode.CorpusEncoder`)."""

    @property
    def hash(self) -> str:
        """Of everything that changes a vector."""
        ...

    def embed_queries(
        self, instances: Sequence[Instance], *, progress: str | None = None, mesh: Mesh | None = None
    ) -> Float[np.ndarray, "N D"]: ...

    def embed_keys(
        self, instances: Sequence[Instance], *, progress: str | None = None, mesh: Mesh | None = None
    ) -> Float[np.ndarray, "N D"]: ...


@runtime_checkable
class AnswerStore(Protocol):
    """Answers that outlive the process which makes them (`pipeline.answers.KeptAnswers`)."""

    def __len__(self) -> int:
        """How many were there from the beginning."""
        ...

    def get(self, batch: int) -> Mapping[int, Prediction] | None:
        """The answers of a batch, by the place of their instance; None = they are still to be made."""
        ...

    def add(self, batch: int, answers: Mapping[int, Prediction]) -> None: ...


@runtime_checkable
class Answering(Protocol):
    """A trained stage that answers (`parts.generator.answerer.Answerer`)."""

    def respond(
        self,
        instances: Sequence[Instance],
        *,
        batch_size: int,
        seed: int | Sequence[int],
        progress: str | None = None,
        kept: AnswerStore | None = None,
    ) -> list[Prediction]:
        """One prediction per instance, in order; `notes` have `nll`, `num_tokens` and `emotion_by_head`.

        With a `seed` for each instance its answer is the same in every batch.

        Batches whose answers `kept` has are not answered again; the others' are added to it.
        """
        ...

    def emotions(self, instances: Sequence[Instance], *, batch_size: int) -> list[dict[str, str]]:
        """Each instance's emotion by head; empty where there is no head."""
        ...


@runtime_checkable
class ExemplarSource(Protocol):
    """Where a system's exemplars come from (`parts.exemplars.parts.ExemplarSearch`)."""

    @property
    def encoder(self) -> InstanceEncoder:
        """Of the contexts that are searched with."""
        ...

    @property
    def pairs(self) -> Sequence[Instance]:
        """What exemplars are taken from."""
        ...

    def find(self, instances: Sequence[Instance]) -> tuple[Int[np.ndarray, "N K"], Float[np.ndarray, "N K"]]:
        """The exemplars that the system itself finds: rows of `pairs`, best first, -1 = none, and scores."""
        ...


@runtime_checkable
class ExemplarAnswering(Answering, Protocol):
    """An `Answering` with exemplars, which can be given others than it finds."""

    @property
    def exemplars(self) -> ExemplarSource | None:
        """None: what it was trained with shows none."""
        ...

    def respond(
        self,
        instances: Sequence[Instance],
        *,
        batch_size: int,
        seed: int | Sequence[int],
        progress: str | None = None,
        kept: AnswerStore | None = None,
        exemplars: Int[np.ndarray, "N K"] | None = None,
    ) -> list[Prediction]:
        """As `Answering.respond`, shown these rows of `exemplars.pairs`, -1 = none; None = what it finds."""
        ...

    def weigh(
        self,
        instances: Sequence[Instance],
        exemplars: Int[np.ndarray, "N K"],
        *,
        batch_size: int,
        seed: int,
        progress: str | None = None,
        kept: AnswerStore | None = None,
    ) -> list[Prediction]:
        """Likelihoods of the gold responses alone: predictions with empty responses; draws only what `respond` draws
        before a response.

        `notes` have `nll` in nats and `num_tokens`, and by their sum `nll_first`, `nll_rest` and `nll_end`: of the
        first token, of the end, and of all between them.
        """
        ...


@dataclasses.dataclass(frozen=True)
class Reading:
    """How an encoder wants its texts.

    Attributes:
      query_prompt: stands before a query.
      key_prompt: stands before a text that is searched for.
      prompt: stands before a text that is neither.
      pools_prompt: whether the states of a prompt are pooled with the text's.
      max_tokens: of a text with its frame, that the encoder was made for; None = no word of it.
    """

    query_prompt: str = ""
    key_prompt: str = ""
    prompt: str = ""
    pools_prompt: bool = True
    max_tokens: int | None = None


@runtime_checkable
class Tokenizer(Protocol):
    """Text to ids and back. `encode` reads plain text and adds no special ids; `token_id` looks one token up.

    `mark` prepares a frame of ours, so that `encode` reads the control tokens in it as such.
    """

    pad_id: int
    eos_id: int
    start_id: int  # what a decoder reads first
    vocab_size: int

    @property
    def cls_id(self) -> int: ...  # what stands before a text for an encoder, and
    @property
    def sep_id(self) -> int: ...  # behind it
    @property
    def unk_id(self) -> int | None: ...  # stands for the words that a vocabulary of words lacks; None = none does
    @property
    def framing(self) -> tuple[list[int], list[int]]: ...  # what a pretrained model knows before and behind a text
    @property
    def reading(self) -> Reading: ...
    @property
    def rare_words(self) -> int: ...  # how many words of the texts that it was trained on are `unk_id`

    def encode(self, text: str) -> list[int]: ...
    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]: ...
    def encode_with_places(self, texts: Sequence[str]) -> list[tuple[list[int], list[tuple[int, int]]]]: ...
    def mark(self, frame: str) -> str: ...
    def decode(self, ids: Sequence[int], words: Sequence[str] = ()) -> str: ...
    def token_id(self, token: str) -> int: ...


@runtime_checkable
class StepFn(Protocol):
    """One decoding step; decoding knows no model. B examples, K hypotheses each."""

    def __call__(self, tokens: Int[Array, "B K"], cache: Any) -> tuple[Float[Array, "B K V"], Any]: ...
