"""A finished run that answers: what chat, a web page or an evaluation with people talks to."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from empax.core.config import ConfigError, to_settings
from empax.core.files import WorkDir, read_json
from empax.core.lock import holder
from empax.core.manifest import check, read_config
from empax.core.run import RunContext
from empax.core.types import Instance, Prediction
from empax.pipeline import annotate, evaluate, run
from empax.pipeline.records import check_origins
from empax.systems.attributes import ClassifierJudge
from empax.systems.dialogue.responder import Responder


@dataclasses.dataclass(frozen=True)
class Session:
    """One loaded run.

    Attributes:
      judges: classifiers of the attributes; none where the recipe has no `annotate`.
      head: the emotion head that evaluation chose; empty where none has learnt emotions.
    """

    responder: Responder
    judges: Sequence[ClassifierJudge]
    sentiment_threshold: float
    head: str
    seed: int

    @classmethod
    def load(cls, workdir: Path) -> Session:
        """Loads what `python -m empax.main --workdir=DIR` left.

        Raises:
          ConfigError: the run is not there or not finished.
          DataError: a file that it needs is damaged.
          CheckpointError: likewise of parameters.
        """
        files = WorkDir(workdir)
        if not files.config.exists():
            raise ConfigError(f"{workdir} holds no run; give the --workdir of one that has finished.")
        config = read_config(files)
        stages = {stage.kind: stage for stage in run.make_stages(config)}
        evaluated = evaluate.main_stage(config)
        needed = config["run"][: config["run"].index(evaluated) + 1] if evaluated else []
        missing = [name for name in needed if not files.done(name).exists()] if needed else ["evaluate"]
        if missing:
            running = holder(files)
            raise ConfigError(
                f"{workdir} has not finished its {missing[0]} stage yet; "
                + (f"{running} is still running it." if running else "run its recipe to the end.")
            )
        check_origins(files, config, needed)
        settings = to_settings(evaluate.Settings, config[evaluated], where=f"config.{evaluated}")
        context = RunContext(files, config, evaluated)
        system = run.load_system(config)
        # One bucket: one compilation, so that every answer is as fast as the second.
        longest = to_settings(system.SETTINGS, config[config["system"]], where="config").layout.max_source_tokens
        responder = system.load_responder(
            context, stage=settings.stage, index=settings.index, buckets=(longest,)
        ).for_single_texts()
        judges, threshold = (), 0.05
        if "annotate" in stages:
            labels: annotate.Settings = stages["annotate"].settings
            judges = tuple(
                dataclasses.replace(judge, buckets=(judge.max_tokens,))
                for judge in annotate.load_judges(labels, context)
            )
            threshold = labels.sentiment_threshold
        about = files.stage(context.stage) / "evaluate.json"
        check(about)
        head = read_json(about).get("emotion_head", "")
        return cls(responder, judges, threshold, head, config["seed"])

    def reply(self, context: Sequence[str]) -> Prediction:
        """Answers a conversation; `context` alternates and ends with the speaker's turn.

        Raises:
          ConfigError: there is nothing to answer.
        """
        turns = tuple(turn.strip() for turn in context)
        if not turns or not turns[-1]:
            raise ConfigError("there is nothing to answer: the last turn is empty.")
        notes = {}
        if self.judges:
            levels = annotate.judge_levels(self.judges, [turns], [""], self.sentiment_threshold)
            notes["context_attributes"] = levels[0]
        instance = Instance(id="chat#1", context=turns, response="", emotion="", notes=notes)
        prediction = self.responder.respond([instance], batch_size=1, seed=self.seed)[0]
        emotion = prediction.notes["emotion_by_head"][self.head] if self.head else ""
        return dataclasses.replace(prediction, emotion_prediction=emotion)
