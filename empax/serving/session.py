"""A finished run that answers conversations, for chat, a web page or human evaluation."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from empax.core.cache import enable_compilation_cache
from empax.core.config import LARGEST_INT, ConfigError
from empax.core.files import WorkDir, read_json, read_jsonl
from empax.core.lock import holder
from empax.core.manifest import verify
from empax.core.paths import expand
from empax.core.protocols import Answering
from empax.core.system import RunContext
from empax.core.types import Instance, Prediction
from empax.data.english import with_capitals, written
from empax.data.spans import Span, marked
from empax.evaluation.reply_checks import wilson_low
from empax.parts.attributes import ClassifierJudge
from empax.pipeline import annotate, evaluate
from empax.pipeline.plan import read_plan
from empax.pipeline.records import check_origins
from empax.serving.pairs import Texts, given_turns
from empax.serving.safety import Before, answer_to_danger, without_fixed

After = Callable[[str], str]


@dataclasses.dataclass(frozen=True)
class Session:
    """One loaded run.

    Attributes:
      judges: classifiers of the attributes; empty if the recipe has no `annotate`, or skips them all.
      mark: marks reasons in contexts; None if the recipe has no such model.
      annotates: whether texts have attributes; without judges, only their sentiment.
      of_replies: whether the attributes describe the reply, not the context: the recipe annotates no contexts.
      head: the emotion head that evaluation chose; empty if none predicts emotions better than chance.
      before: a hook that receives the user's newest text; unless it returns None, its result replaces the model's
        reply. By default, messages that seem to speak of self-harm or danger get a fixed answer that names help
        (`serving.safety`). None: the model answers everything.
      after: a hook that receives the model's reply and returns its replacement.
    """

    answerer: Answering
    judges: Sequence[ClassifierJudge]
    head: str
    seed: int
    before: Before | None = answer_to_danger
    after: After | None = None
    annotates: bool = False
    of_replies: bool = False
    mark: Callable[[Sequence[Sequence[str]]], Sequence[Any]] | None = None

    @classmethod
    def load(
        cls, workdir: Path | str, *, before: Before | None = answer_to_danger, after: After | None = None
    ) -> Session:
        """Loads a run of `python -m empax.main --workdir=DIR`; for the hooks see `Session`.

        Compiled programs are cached for other processes, as in `load`.

        Raises:
          ConfigError: the run does not exist or is not finished.
          DataError: a required file is damaged.
          CheckpointError: a checkpoint is missing or damaged.
        """
        enable_compilation_cache()
        files = WorkDir(expand(workdir))
        if not files.config.exists():
            raise ConfigError(f"{files.root} holds no run; give the work directory of one that has finished.")
        plan = read_plan(files)
        stages = {stage.kind: stage for stage in plan.stages.values()}
        evaluated = evaluate.main_stage(plan)
        needed = [*RunContext(files, plan, evaluated).before(), evaluated] if evaluated else []
        missing = [name for name in needed if not files.done(name).exists()] if needed else ["evaluate"]
        if missing:
            running = holder(files)
            raise ConfigError(
                f"{workdir} has not finished its {missing[0]} stage yet; "
                + (f"{running} is still running it." if running else "run its recipe to the end.")
            )
        check_origins(files, [plan.stages[name] for name in needed])
        context = RunContext(files, plan, evaluated)
        # No buckets: one compilation, so that all answers after the first are fast.
        answerer = evaluate.load_answerer(context.settings(evaluated, evaluate.Settings), context, ())
        judges, of_replies, mark = (), False, None
        if "annotate" in stages:
            labels: annotate.Settings = stages["annotate"].settings
            judges = tuple(
                dataclasses.replace(judge, buckets=(judge.max_tokens,))
                for judge in annotate.load_judges(labels, context)
            )
            of_replies, mark = not labels.contexts, annotate.load_marker(labels, context)
        about = files.stage(context.stage) / "evaluate.json"
        verify(about)
        head = read_json(about).get("emotion_head", "")
        if head:
            verify(files.predictions, stage=files.stage(context.stage))
            head = head if beats_chance(read_jsonl(files.predictions)) else ""
        annotates = "annotate" in stages
        return cls(answerer, judges, head, plan.seed, before, after, annotates, of_replies, mark)

    def reply(self, context: Texts | str) -> Prediction:
        """Answers a conversation; the turns of `context` alternate, and the last is the speaker's. A text is one turn.

        Replies of a word vocabulary are without the blanks of its tokenizer, and those of a tokenizer that lower-cases
        have capitals: "Oh no!", not "oh no !".

        Messages that got `safety.ANSWER` are left out of the context, with that answer. A reply of the hook `before`
        has only the note `answered_by`.

        Raises:
          ConfigError: there is no turn, or a turn is not a text.
        """
        return self.replies([context])[0]

    def replies(self, contexts: Sequence[Texts | str], *, seeds: Sequence[int] | None = None) -> list[Prediction]:
        """Answers several conversations in one batch; with the same seed, each reply equals that of `reply`.

        Args:
          contexts: conversations as in `reply`.
          seeds: one seed for each, instead of the session's.

        Raises:
          ConfigError: as `reply`; or `contexts` is one text, or `seeds` are not one integer for each.
        """
        if isinstance(contexts, str):
            raise ConfigError("contexts is a text, not a list of conversations; pass it to reply, or write [[text]].")
        turns = [without_fixed(given_turns(context, "context")) for context in contexts]
        own = [self.seed] * len(turns) if seeds is None else list(seeds)
        if len(own) != len(turns) or not all(
            isinstance(seed, int | np.integer) and 0 <= seed <= LARGEST_INT for seed in own
        ):
            raise ConfigError(
                f"seeds = {own} must have a whole number in [0, {LARGEST_INT}] for each of {len(turns)} contexts."
            )
        fixed = [self.before(each[-1]) if self.before else None for each in turns]
        said = {
            n: Prediction(turns[n], answer, reference="", id="chat#1", notes={"answered_by": "before"})
            for n, answer in enumerate(fixed)
            if answer is not None
        }
        if left := [n for n in range(len(turns)) if n not in said]:
            # Batch sizes are powers of two, so that few programs are compiled.
            filled = [*left, *[left[-1]] * ((1 << (len(left) - 1).bit_length()) - len(left))]
            found = self._answers([turns[n] for n in filled], [own[n] for n in filled])
            said.update(zip(left, found, strict=False))
        return [said[n] for n in range(len(turns))]

    def _answers(self, contexts: list[tuple[str, ...]], seeds: list[int]) -> list[Prediction]:
        levels = self.annotates and not self.of_replies
        notes = annotate.context_notes(contexts, self.judges, self.mark, levels=levels)
        instances = [
            Instance(id="chat#1", context=turns, response="", emotion="", notes=note)
            for turns, note in zip(contexts, notes, strict=True)
        ]
        found = self.answerer.respond(instances, batch_size=len(instances), seed=seeds)
        tokenizer = getattr(self.answerer, "tokenizer", None)
        of_words = tokenizer is not None and tokenizer.unk_id is not None
        responses = [written(one.response) if of_words else one.response for one in found]
        if tokenizer is not None and tokenizer.encode("I") == tokenizer.encode("i"):
            responses = list(map(with_capitals, responses))
        responses = list(map(self.after, responses)) if self.after else responses
        told = [dict(one.notes) for one in found]
        if self.annotates and self.of_replies:
            found_levels = annotate.judge_levels(self.judges, contexts, responses)
            for note, one in zip(told, found_levels, strict=True):
                note["response_attributes"] = one
        return [
            dataclasses.replace(
                one,
                response=response,
                emotion_prediction=note["emotion_by_head"][self.head] if self.head else "",
                notes=note,
            )
            for one, response, note in zip(found, responses, told, strict=True)
        ]


def beats_chance(rows: Iterable[Mapping[str, Any]]) -> bool:
    """Whether the accuracy of predicted emotions is clearly above that of always predicting the most frequent emotion.

    Clearly: the lower end of the 95% interval of the accuracy (Wilson 1927) is above the share of that emotion. Rows of
    predictions.jsonl without a known or a predicted emotion are ignored.
    """
    pairs = [(row["emotion"], row["emotion_prediction"]) for row in rows]
    pairs = [(gold, found) for gold, found in pairs if gold and found]
    if not pairs:
        return False
    golds = collections.Counter(gold for gold, _ in pairs)
    return wilson_low(sum(gold == found for gold, found in pairs), len(pairs)) > max(golds.values()) / len(pairs)


def why_of(found: Prediction) -> dict[str, Any]:
    """Returns the explanation of a reply, as far as the system provides one."""
    notes = found.notes
    spans = [Span(*s) for s in notes.get("reasons", ())]
    turns = marked(found.context, spans)
    kept = [
        {"said": e["context"][-1], "reply": e["response"], "emotion": e.get("emotion", ""),
         "score": e.get("score"), "source": e.get("id", "")}
        for e in found.exemplars
    ]  # fmt: skip
    why = {
        "emotion": found.emotion_prediction,
        "attributes": dict(found.attributes or notes.get("response_attributes", {})),
        "exemplars": kept,
        "facts": [f"{fact['words']} ({fact['relation']})" for fact in notes.get("facts", ())],
        "intents": [notes[name] for name in ("intent_first", "intent_second", "intent_prediction") if name in notes],
        "reasons": " … ".join(turns[turn] for turn in sorted({span.turn for span in spans})),
    }
    return {name: value for name, value in why.items() if value}
