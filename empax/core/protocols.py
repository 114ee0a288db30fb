"""Interfaces between the layers of the package. Structural types: nothing inherits from these."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol, runtime_checkable

import jax
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from empax.core.types import AnyBatch, Instance, Mean, Metrics, Params, Prediction


@runtime_checkable
class Task(Protocol):
    """A trainable task. `frozen` (teacher, reference, scorers) is an argument, never a closure."""

    def init(self, rng: jax.Array, batch: AnyBatch) -> Params: ...

    def loss(
        self, params: Params, frozen: Params, batch: AnyBatch, rng: jax.Array, *, train: bool
    ) -> tuple[Mean, Metrics]:
        """Returns the loss to minimise and the metrics to log; applies dropout if `train`.

        All randomness comes from `rng`: in an evaluation, from the run's seed and the batch number.
        """
        ...


def untrained_by(task: Task) -> str:
    """Returns the regular expression of the parameters that no loss of the task trains; empty = all are trained.

    Weight decay must not move them. It matches from the start of a name.
    """
    return getattr(task, "untrained", "")


@runtime_checkable
class OnlineTask(Task, Protocol):
    def explore(self, params: Params, frozen: Params, batch: AnyBatch, rng: jax.Array) -> AnyBatch:
        """Samples from the current model what it needs to learn from `batch`; no gradient flows."""
        ...


@runtime_checkable
class ReinforcedTask(Task, Protocol):
    """A task that learns from ratings of its own answers, with several updates per batch of answers.

    One iteration: `rollout`, `rate`, `credit`, then `loss` on mini-batches of the result of `credit`. If an earlier
    stage trained the initial parameters, `rollout` finds them in `frozen["reference"]`.
    """

    rates_on_host: bool
    """Whether `rate` is plain Python; otherwise it is compiled with the rest."""

    def learns_from(self, name: str) -> int:
        """Returns the first batch, counted from 0, that trains the parameter of that name; it is fixed before."""
        ...

    def init_memory(self) -> Any:
        """Returns the state between iterations besides the parameters (a controller, running statistics): a pytree."""
        ...

    def rollout(self, params: Params, frozen: Params, batch: AnyBatch, rng: jax.Array) -> AnyBatch:
        """Adds answers of the current model to the batch, as many rows per example as it samples; compiled."""
        ...

    def rate(self, frozen: Params, batch: AnyBatch) -> AnyBatch:
        """Adds a score for each answer to the batch."""
        ...

    def credit(self, frozen: Params, batch: AnyBatch, memory: Any) -> tuple[AnyBatch, Any, Metrics]:
        """Assigns credit to tokens; returns the batch, the new memory and the metrics of the iteration. Compiled."""
        ...

    def check_start(self, metrics: Mapping[str, float], *, step: int) -> None:
        """Checks the averages of `loss` on the first answers of a process, before training on them.

        `step` is the number of batches trained on; 0 = the model still has its initial parameters.

        Raises:
          TrainingError: the numbers are implausible.
        """
        ...

    def check_progress(self, metrics: Mapping[str, float], *, step: int) -> None:
        """Checks the averages of a logged row; warns, or raises TrainingError."""
        ...


@runtime_checkable
class SummarizingTask(Task, Protocol):
    def summarize(self, averages: dict[str, float]) -> dict[str, float]:
        """Returns the metrics of an evaluation from its averages: for metrics that are not means (F1)."""
        ...


@runtime_checkable
class Examples(Protocol):
    """Tokenised examples with random access, from which batches are made.

    `lengths[N]` is the source length of each example in tokens, the bucketing key. `lengths[N, 2]` is source and target
    length; batches of an evaluation then hold targets of similar length. `order_lengths` stays fixed if `lengths`
    change.
    """

    lengths: np.ndarray

    def __len__(self) -> int: ...

    def collate(self, indices: np.ndarray, length: int, rng: np.random.Generator) -> AnyBatch:
        """Returns rows `indices[B]` (-1 = filler) as a batch of numpy arrays, sources padded to `length` tokens."""
        ...


@runtime_checkable
class InstanceEncoder(Protocol):
    """Encoder of instances into index vectors (`retrieval.encode.CorpusEncoder`)."""

    @property
    def hash(self) -> str:
        """Hash of everything that changes a vector."""
        ...

    def embed_queries(
        self, instances: Sequence[Instance], *, progress: str | None = None, mesh: Mesh | None = None
    ) -> Float[np.ndarray, "N D"]: ...

    def embed_keys(
        self, instances: Sequence[Instance], *, progress: str | None = None, mesh: Mesh | None = None
    ) -> Float[np.ndarray, "N D"]: ...


@runtime_checkable
class AnswerStore(Protocol):
    """Answers stored across processes (`pipeline.answers.KeptAnswers`)."""

    def get(self, batch: int) -> Mapping[int, Prediction] | None:
        """Returns the answers of a batch, by the position of their instance; None = not answered yet."""
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
        exemplars: Int[np.ndarray, "N K"] | None = None,
    ) -> list[Prediction]:
        """Returns one prediction per instance, in order; `notes` have `nll`, `num_tokens` and `emotion_by_head`.

        With one `seed` per instance, an answer does not depend on its batch.

        Batches with answers in `kept` are skipped; the answers of other batches are added to it.

        An `ExemplarAnswering` shows these rows of its `exemplars.pairs`, -1 = none; None = those that it retrieves.
        """
        ...

    def emotions(self, instances: Sequence[Instance], *, batch_size: int, seed: int = 0) -> list[dict[str, str]]:
        """Returns the emotions of each instance by head; empty without a head. `seed` is as in `respond`."""
        ...


@runtime_checkable
class ExemplarSource(Protocol):
    """The source of a system's exemplars (`parts.exemplars.parts.ExemplarSearch`)."""

    @property
    def encoder(self) -> InstanceEncoder:
        """Encoder of the query contexts."""
        ...

    @property
    def pairs(self) -> Sequence[Instance]:
        """Instances that exemplars are taken from."""
        ...

    def find(self, instances: Sequence[Instance]) -> tuple[Int[np.ndarray, "N K"], Float[np.ndarray, "N K"]]:
        """Retrieves exemplars for instances: rows of `pairs`, best first, -1 = none, and scores."""
        ...


@runtime_checkable
class ExemplarAnswering(Answering, Protocol):
    """An `Answering` with exemplars, which accepts other exemplars than it retrieves."""

    @property
    def exemplars(self) -> ExemplarSource | None:
        """Source of the exemplars; None if the stage was trained without exemplars."""
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
        """Computes likelihoods of the gold responses: predictions with empty responses. Samples only what `respond`
        samples before decoding.

        `notes` have `nll` in nats and `num_tokens`. `nll_first`, `nll_rest` and `nll_end` add up to `nll`: the first
        token, the end-of-sequence token, and all tokens between them.
        """
        ...


@dataclasses.dataclass(frozen=True)
class Reading:
    """The input format of a text encoder.

    Attributes:
      query_prompt: prefix of a query.
      key_prompt: prefix of a text to search for.
      prompt: prefix of any other text.
      pools_prompt: whether pooling includes the states of the prompt.
      max_tokens: most tokens of a text with its frame that the encoder supports; None = unspecified.
      keep: the end of a longer text that the folder keeps. Queries and exemplars do not depend on it.
    """

    query_prompt: str = ""
    key_prompt: str = ""
    prompt: str = ""
    pools_prompt: bool = True
    max_tokens: int | None = None
    keep: Literal["start", "end"] = "start"


@runtime_checkable
class Tokenizer(Protocol):
    """A tokenizer. `encode` reads plain text and adds no special ids; `token_id` looks up one token.

    `mark` prepares one of our frames, so that `encode` recognizes its control tokens.
    """

    pad_id: int
    eos_id: int
    start_id: int  # first input of a decoder
    vocab_size: int

    @property
    def cls_id(self) -> int: ...  # precedes a text for an encoder
    @property
    def sep_id(self) -> int: ...  # follows it
    @property
    def unk_id(self) -> int | None: ...  # stands for unknown words of a word vocabulary; None = there is no such id
    @property
    def framing(self) -> tuple[list[int], list[int]]: ...  # special ids of a pretrained model before and after a text
    @property
    def reading(self) -> Reading: ...
    @property
    def rare_words(self) -> int: ...  # number of words of the training texts that are `unk_id`

    def encode(self, text: str) -> list[int]: ...
    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]: ...
    def encode_with_places(self, texts: Sequence[str]) -> list[tuple[list[int], list[tuple[int, int]]]]: ...
    def mark(self, frame: str) -> str: ...
    def decode(self, ids: Sequence[int], words: Sequence[str] = ()) -> str: ...
    def token_id(self, token: str) -> int: ...


@runtime_checkable
class StepFn(Protocol):
    """One decoding step, independent of the model. B examples, K hypotheses each."""

    def __call__(self, tokens: Int[Array, "B K"], cache: Any) -> tuple[Float[Array, "B K V"], Any]: ...
