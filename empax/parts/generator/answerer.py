"""The answerer: any trained task that generates and reads, on the examples that its system builds."""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeAlias, runtime_checkable

import jax
import numpy as np

from empax.core.machine import fetched
from empax.core.memory import give_back_freed_memory
from empax.core.progress import Progress
from empax.core.protocols import AnswerStore, Examples, ExemplarSource, Tokenizer
from empax.core.sharding import MeshSettings, batch_sharding, local_mesh, place_rows, rows_split_as
from empax.core.types import EMOTIONS, Instance, Params, Prediction
from empax.data.batches import eval_batches
from empax.data.chat_prompts import TOLD
from empax.data.dialogues import own_fields
from empax.decoding.neighbours import States
from empax.decoding.passages import PassageReader
from empax.decoding.sampling import Draws, Randomness, folded
from empax.models.fusion_in_decoder import FusionInDecoder
from empax.parts.generator.parts import places
from empax.parts.generator.settings import QuestionSettings

_QUESTION_STREAM = 1 << 30  # folded into the keys of the first question; numbers of batches are lower
_KEPT_BATCHES = 1 << 24  # numbers between the kept batches of replies, of the first question, of the second, ...
_BATCHES_OF_FREED_MEMORY = 8
_WORDS = 3
"""Words kept of the answer to a question that is asked first."""


@dataclasses.dataclass(frozen=True)
class AnswerExamples:
    """The examples of instances for a task.

    Attributes:
      examples: one per instance, in order.
      notes: further results in each instance's prediction, by name: knowledge, intents, ...; "exemplars" become the
        prediction's exemplars.
      words: words of the ids after the vocabulary in each instance's answer; empty = there are no such ids.
    """

    examples: Examples
    notes: Sequence[Mapping[str, Any]]
    words: Sequence[Sequence[str]] = ()


_Asking: TypeAlias = tuple[int, tuple[str, ...], bytes]
"""A seed, a context, and the rows of the exemplars given with it."""

MakeExamples: TypeAlias = Callable[[Sequence[Instance]], AnswerExamples]


@runtime_checkable
class ShowsExemplars(ExemplarSource, Protocol):
    """A `MakeExamples` that finds exemplars, and can show others."""

    def show(self, instances: Sequence[Instance], rows: np.ndarray, scores: np.ndarray) -> AnswerExamples: ...


class Answerer:
    """Answers instances. Gold responses, if given, are scored, and are never an input.

    A word unknown to a word-level vocabulary costs the unknown token plus a uniform choice among the rare words that it
    stands for; else a smaller vocabulary would have a lower perplexity. `num_unknown` in the notes counts such words; a
    task that can copy some of them returns in `read` how many remain. Source: Ueberla 1994 (adjusted perplexity), there
    with the test's unknown words.

    Args:
      task: has `generate`, `read` and `heads` (see `Generator`); likelihoods that `read` returns under a name "nll_..."
        also become notes. Passages of a Fusion-in-Decoder are encoded without padding on a CPU with one device, unless
        `single`.
      params: parameters of the task.
      make_examples: builds the task's examples of instances.
      tokenizer: tokenizer of the answers.
      buckets: source lengths in tokens to pad to.
      labels: names of the integers that `read` returns, besides the emotions of `heads`: {"intent": INTENTS}.
      mesh: layout of the devices.
      single: whether contexts come from people, one or a few at a time: few shapes are compiled, nothing is kept. An
        answer cut at its length limit has the note "cut".
      questions: questions that the task answers about each context before it replies: the first words go into the note
        "told", in prompts and predictions.
    """

    def __init__(
        self,
        task: Any,
        params: Params,
        make_examples: MakeExamples,
        tokenizer: Tokenizer,
        buckets: Sequence[int],
        *,
        labels: Mapping[str, Sequence[str]] | None = None,
        mesh: MeshSettings | None = None,
        single: bool = False,
        questions: Sequence[QuestionSettings] = (),
    ):
        self._questions, self._told = tuple(questions), dict[_Asking, dict[str, str]]()
        self._single = single
        self.task, self.tokenizer, self.buckets = task, tokenizer, tuple(buckets)
        self._make_examples, self._labels = make_examples, dict(labels or {})
        self._mesh_settings = MeshSettings() if mesh is None else mesh
        self._mesh = local_mesh(self._mesh_settings)
        model = getattr(task, "model", None)
        fuses = isinstance(model, FusionInDecoder) and not single and self._mesh is None
        fuses &= jax.default_backend() == "cpu"  # elsewhere encoding them separately costs more than their padding
        self._reader = PassageReader(model) if fuses else None
        decoder = getattr(task, "decoder", None)
        self._ends = {tokenizer.pad_id, *(decoder.eos_ids if decoder else (tokenizer.eos_id,))}
        self._forced = int(decoder.settings.end_at_limit) if decoder else 0
        self.take(params)
        rows = batch_sharding(self._mesh) if self._mesh else None

        def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(function)
            def split(*args: Any) -> Any:
                with rows_split_as(rows):
                    return function(*args)

            return jax.jit(split)

        def answer(params: Params, batch: Any, rng: Randomness) -> tuple[Any, Any]:
            return task.generate(params, {}, batch, rng).tokens[:, 0], task.read(params, batch)

        self._answer, self._read = compiled(answer), compiled(task.read)
        self._weigh = compiled(lambda params, batch: task.weigh(params, batch))  # not every task has it

    @property
    def heads(self) -> tuple[str, ...]:
        """The emotion heads that this run has."""
        return self.task.heads

    @property
    def exemplars(self) -> ShowsExemplars | None:
        """The source of its exemplars; None = it reads none."""
        return self._make_examples if isinstance(self._make_examples, ShowsExemplars) else None

    def remember(self, instances: Sequence[Instance], *, batch_size: int = 32) -> None:
        """Keeps the decoder states before the tokens of these responses, for the task's `neighbours`; in 16 bits."""
        examples, keys, tokens = self._make_examples(instances).examples, [], []
        states = jax.jit(self.task.target_states)
        with Progress("states of training", total=len(examples), unit="responses") as shown:
            for indices, batch in self._batches(examples, batch_size):
                real = np.asarray(batch.target_mask) & (indices >= 0)[:, None]
                keys.append(
                    np.asarray(jax.device_get(states(self._params, self._placed(batch))))[real].astype(np.float16)
                )
                tokens.append(np.asarray(batch.target)[real])
                shown.advance(int((indices >= 0).sum()))
        self.take(self.task.with_states(self._params, States(np.concatenate(keys), np.concatenate(tokens))))

    def take(self, params: Params) -> None:
        """Sets the parameters; they are put onto this process's devices once, not with every batch."""
        self._told.clear()
        mesh = self._mesh
        self._params = jax.device_put(params, places(params, mesh, self._mesh_settings) if mesh else None)

    def respond(
        self,
        instances: Sequence[Instance],
        *,
        batch_size: int,
        seed: int | Sequence[int],
        progress: str | None = None,
        kept: AnswerStore | None = None,
        exemplars: np.ndarray | None = None,
    ) -> list[Prediction]:
        """Returns one prediction per instance, in order; `notes` have the results of `read`, and each head's emotion.

        Randomness depends on the seed and the number of the batch, so that `kept` answers are consistent with new ones.
        If each instance has its own seed, its answer is the same as alone, in a first batch.
        `exemplars` replace those that it finds: rows of `exemplars.pairs`, [N, K], -1 = none.
        """
        instances = self._with_told(instances, batch_size, seed, exemplars, kept)
        return self._respond(instances, batch_size, seed, progress, kept, exemplars)

    def _with_told(
        self,
        instances: Sequence[Instance],
        batch_size: int,
        seed: int | Sequence[int],
        exemplars: np.ndarray | None,
        kept: AnswerStore | None,
    ) -> Sequence[Instance]:
        """Adds the answers to the questions to the instances; with one seed, each context is asked about once.

        With other exemplars it is asked again.
        """
        if not self._questions:
            return instances
        if self._single:
            self._told.clear()  # nothing that people say is kept
        seeds = [seed] * len(instances) if isinstance(seed, int) else seed
        rows = [b""] * len(instances) if exemplars is None else [row.tobytes() for row in exemplars]
        asking = [(each, i.context, row) for each, i, row in zip(seeds, instances, rows, strict=True)]
        left = {key: place for place, key in enumerate(asking) if key not in self._told}
        new, own = [instances[place] for place in left.values()], [each for each, *_ in left]
        # The same exemplars with each question: a search would include the question in the query.
        if exemplars is not None:
            shown = exemplars[list(left.values())]
        else:
            shown = self.exemplars.find(new)[0] if new and self.exemplars is not None else None
        for number, question in enumerate(self._questions if new else ()):
            name, text = question.name, question.text
            asked = [
                dataclasses.replace(
                    i, context=(*i.context[:-1], f"{i.context[-1]}\n\n{text}"), response="", notes=self._noted(i, key)
                )
                for key, i in zip(left, new, strict=True)
            ]
            said = self._respond(
                asked, batch_size, seed if isinstance(seed, int) else own, f"asked first: {name}", kept, shown,
                question=number,
            )  # fmt: skip
            for key, answer in zip(left, said, strict=True):
                words = re.findall(r"[^\W\d_][\w'-]*", answer.response)[:_WORDS]
                self._told.setdefault(key, {}).update({name: " ".join(words)} if words else {})
        return [dataclasses.replace(i, notes=self._noted(i, key)) for key, i in zip(asking, instances, strict=True)]

    def _noted(self, instance: Instance, asking: _Asking) -> dict[str, Any]:
        return {**instance.notes, TOLD: dict(self._told.get(asking, {}))}

    def _respond(
        self,
        instances: Sequence[Instance],
        batch_size: int,
        seed: int | Sequence[int],
        progress: str | None,
        kept: AnswerStore | None,
        exemplars: np.ndarray | None,
        question: int | None = None,
    ) -> list[Prediction]:
        made_of = self._make_examples(instances) if exemplars is None else self._shown(instances, exemplars)
        unknown = _where_unknown(self.tokenizer, [i.response for i in instances])
        keys = jax.random.key(seed) if isinstance(seed, int) else jax.vmap(jax.random.key)(np.asarray(seed, np.uint32))
        if question is not None:
            fold = functools.partial(jax.random.fold_in, data=_QUESTION_STREAM + question)
            keys = fold(keys) if isinstance(seed, int) else jax.vmap(fold)(keys)

        def ask(number: int, indices: np.ndarray, batch: Any) -> Any:
            rng = folded(keys, number) if isinstance(seed, int) else folded(Draws(keys[indices]), 0)
            return self._answer(self._params, self._placed(batch), rng)

        def answered(i: int, found: Any) -> Prediction:
            tokens, read = found
            counted = {} if self.tokenizer.unk_id is None else {"num_unknown": sum(unknown[i])}
            notes = {**counted, **made_of.notes[i]}
            if told := instances[i].notes.get(TOLD):
                notes[TOLD] = told
            if "num_unknown" in read:
                notes["num_unknown"] = int(read["num_unknown"])
            # A forced end is no end.
            if self._single and self._ends.isdisjoint(tokens[: len(tokens) - self._forced][-1:].tolist()):
                notes["cut"] = True
            words = made_of.words[i] if made_of.words else ()
            answer = self.tokenizer.decode([int(t) for t in tokens], words).strip()
            return self._prediction(instances[i], answer, read, notes)

        first = 0 if question is None else (question + 1) * _KEPT_BATCHES
        return self._each(made_of.examples, ask, answered, batch_size, progress, kept, first)

    def weigh(
        self,
        instances: Sequence[Instance],
        exemplars: np.ndarray,
        *,
        batch_size: int,
        seed: int,
        progress: str | None = None,
        kept: AnswerStore | None = None,
    ) -> list[Prediction]:
        """Returns likelihoods of gold responses with given exemplars; see `core.protocols.ExemplarAnswering`."""
        instances = self._with_told(instances, batch_size, seed, exemplars, kept)
        made_of = self._shown(instances, exemplars)
        unknown = _where_unknown(self.tokenizer, [i.response for i in instances])

        def ask(number: int, indices: np.ndarray, batch: Any) -> Any:
            del number, indices
            return self._weigh(self._params, self._placed(batch))

        def weighed(i: int, read: Any) -> Prediction:
            first, rest = (count * self._cost_of_unknown for count in unknown[i])
            more = {"nll": first + rest, "nll_first": first, "nll_rest": rest}
            notes = {name: round(float(value) + more.get(name, 0.0), 5) for name, value in read.items()}
            about, exemplars = instances[i], made_of.notes[i].get("exemplars", ())
            notes["num_tokens"] = int(read["num_tokens"])
            return Prediction(
                about.context, "", about.response, id=about.id, emotion=about.emotion, exemplars=exemplars, notes=notes
            )

        return self._each(made_of.examples, ask, weighed, batch_size, progress, kept)

    def _shown(self, instances: Sequence[Instance], exemplars: np.ndarray) -> AnswerExamples:
        if self.exemplars is None:
            raise ValueError("exemplars are given, but this generator reads none.")
        return self.exemplars.show(instances, exemplars, np.zeros(exemplars.shape, np.float32))

    def _each(
        self,
        examples: Examples,
        ask: Callable[[int, np.ndarray, Any], Any],
        make: Callable[[int, Any], Prediction],
        batch_size: int,
        progress: str | None,
        kept: AnswerStore | None,
        first: int = 0,
    ) -> list[Prediction]:
        """Returns the predictions that `make` builds from the devices' results, or those in `kept`; in order.

        `first` is the number of the first batch in `kept`.
        """
        found: dict[int, Prediction] = {}

        def asked() -> Iterator[tuple[tuple[int, np.ndarray], Any]]:
            for number, (indices, batch) in enumerate(self._batches(examples, batch_size)):
                rows = None if kept is None else kept.get(first + number)
                if rows is None:
                    yield (number, indices), ask(number, indices, batch)
                else:
                    found.update(rows)

        before = 0 if kept is None else sum(len(kept.get(first + n) or ()) for n in range(len(examples)))
        with Progress(progress, total=len(examples), unit="answers", initial=before) as shown:
            for (number, indices), answer in fetched(asked()):
                real = {int(indices[b]): operator.itemgetter(b) for b in np.flatnonzero(indices >= 0)}
                rows = {i: make(i, jax.tree.map(of_row, answer)) for i, of_row in real.items()}
                shown.advance(len(rows))
                if kept is not None:
                    kept.add(first + number, rows)
                found.update(rows)
        return [found[i] for i in range(len(examples))]

    def emotions(self, instances: Sequence[Instance], *, batch_size: int, seed: int = 0) -> list[dict[str, str]]:
        """Returns each head's emotion of each instance, in order, without decoding a reply."""
        if not self.heads:
            return [{} for _ in instances]
        instances = self._with_told(instances, batch_size, seed, None, None)
        made: dict[int, dict[str, str]] = {}
        label = "emotions" if len(instances) > 1 else None
        with Progress(label, total=len(instances), unit="contexts") as shown:
            batches = self._batches(self._make_examples(instances).examples, batch_size)
            for indices, read in fetched((rows, self._read(self._params, self._placed(one))) for rows, one in batches):
                for b in np.flatnonzero(indices >= 0):
                    made[int(indices[b])] = {head: EMOTIONS[int(read[head][b])] for head in self.heads}
                shown.advance(int((indices >= 0).sum()))
        return [made[i] for i in range(len(instances))]

    def _placed(self, batch: Any) -> Any:
        """Puts a batch onto the devices, with its passages encoded if the reader can do so without padding."""
        if self._reader is not None:
            batch = self._reader.read(self._params["model"], batch)
        return place_rows(batch, self._mesh)

    def _batches(self, examples: Examples, batch_size: int) -> Iterator[tuple[np.ndarray, Any]]:
        """Yields `eval_batches`, and regularly returns freed memory of batches of other shapes to the system."""
        for number, batch in enumerate(eval_batches(examples, batch_size=batch_size, buckets=self.buckets), 1):
            yield batch
            if number % _BATCHES_OF_FREED_MEMORY == 0:
                give_back_freed_memory()

    @property
    def _cost_of_unknown(self) -> float:
        """Nats of the choice among the rare words that the unknown token stands for."""
        return math.log(max(self.tokenizer.rare_words, 1))

    def _prediction(
        self, instance: Instance, response: str, read: Mapping[str, np.ndarray], notes: Mapping[str, Any]
    ) -> Prediction:
        emotions = {head: EMOTIONS[int(read[head])] for head in self.heads}
        cost = notes.get("num_unknown", 0) * self._cost_of_unknown
        likelihoods = {name: value for name, value in read.items() if name == "nll" or name.startswith("nll_")}
        labelled = {name: names[int(read[name])] for name, names in self._labels.items()}
        return Prediction(
            context=instance.context,
            response=response,
            reference=instance.response,
            id=instance.id,
            emotion=instance.emotion,
            emotion_prediction=emotions[self.heads[0]] if self.heads else "",
            attributes=dict(instance.notes.get("context_attributes", {})),
            exemplars=notes.get("exemplars", ()),
            notes={
                **{name: round(float(value) + cost, 5) for name, value in likelihoods.items()},
                "num_tokens": int(read["num_tokens"]),
                "emotion_by_head": emotions,
                **labelled,
                **{name: note for name, note in notes.items() if name != "exemplars"},
                **({"fields": own} if (own := own_fields(instance)) else {}),
            },
        )


def _where_unknown(tokenizer: Tokenizer, texts: Sequence[str]) -> list[tuple[int, int]]:
    """Returns for each text the number of unknown words in its first token (0 or 1), and after it."""
    unknown = tokenizer.unk_id
    if unknown is None:
        return [(0, 0)] * len(texts)
    return [(ids[:1].count(unknown), ids[1:].count(unknown)) for ids in tokenizer.encode_batch(texts)]
