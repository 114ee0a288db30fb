"""EmpRL's stages: build policies, their examples and rewards from the settings and the work directory."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from empax.core import distributed
from empax.core.config import ConfigError
from empax.core.files import write_json
from empax.core.paths import expand
from empax.core.shapes import shapes_of
from empax.core.system import AnswerOptions, Assembly, RunContext, Sketch
from empax.core.text_functions import TWO_ROWS
from empax.core.types import Instance, Params
from empax.data import own
from empax.data.batches import draw, draw_dialogues, draw_rows
from empax.data.exemplars import ContextExamples, LabelledBatch
from empax.data.store import check_candidates, check_prepared, load_instances, planned_instances, planned_notes
from empax.decoding.settings import DecodeSettings
from empax.models.heads import EMOTION_HEAD
from empax.parts.attributes import check_identifiers
from empax.parts.exemplars.checks import check_marked, check_passages
from empax.parts.exemplars.parts import ExemplarSearch, RetrievalParts
from empax.parts.exemplars.settings import RetrievalSettings
from empax.parts.generator.answerer import Answerer
from empax.parts.generator.checks import check_answers, check_fusion, check_layout, check_models, decoding_of
from empax.parts.generator.parts import GeneratorParts
from empax.parts.generator.stages import answerer_of, context_examples, generator_params, sketched, taught_heads
from empax.parts.generator.task import Generator
from empax.parts.generator.trained import Trained, generator_to_export
from empax.retrieval.index import load_index
from empax.systems.emprl.policy import Policy
from empax.systems.emprl.preferences import check_apart, given_answers, read_pairs
from empax.systems.emprl.rewards import Reward, make_reward, try_functions
from empax.systems.emprl.rollouts import DialogueExamples, Goals, PolicyBatch, PolicyExamples, Rollout
from empax.systems.emprl.settings import PolicyTaskSettings, PpoTaskSettings, PreferenceTaskSettings
from empax.systems.emprl.tasks import ALGORITHMS
from empax.training.checkpoint import load_params
from empax.training.lora import is_adapted
from empax.training.settings import steps_on


def generator_of(parts: GeneratorParts, *, fused: bool, heads: tuple[str, ...] = ()) -> Generator:
    """Returns the run's generator as a task; `fused` reads several passages; `heads` are the trained emotion heads."""
    model = parts.fusion if fused else parts.reader
    return Generator(model, parts.decoder(parts.settings.decoding), EMOTION_HEAD, emotion_weight=0.0, heads=heads)


def make_policy(parts: GeneratorParts, stage: PolicyTaskSettings, reward: Reward) -> Policy:
    generator = generator_of(parts, fused=bool(stage.index))
    rolled = dataclasses.replace(generator, decoder=parts.decoder(stage.rollout))
    algorithm: Any = ALGORITHMS[type(stage)]  # each algorithm has its own settings
    return algorithm(rolled, reward, stage)


def check_policy(stage: PolicyTaskSettings, run: RunContext) -> None:
    """Raises ConfigError if a stage is missing or a reward function fails, DataError if a file of pairs is wrong."""
    check_prepared(run)
    run.earlier("start_from", stage.start_from, tasks=("generator", "reg.joint"))
    check_layout(run)
    where = f"config.{run.stage}.rollout"
    if (parts := check_models(run)) is not None:
        check_answers(run, parts, [run.named(run.stage)], **{f"{where}.max_tokens": stage.rollout.max_tokens})
    _check_decoding(stage.rollout, where, stage, run.stage, run)
    if stage.replies and parts is not None:  # evaluations may have a decoding of their own
        _check_decoding(parts.settings.decoding, f"{run.shared}.decoding", stage, run.stage, run)
    steps = run.named(run.stage).loop.steps
    if isinstance(stage, PpoTaskSettings) and stage.value_warmup_steps >= steps:
        raise ConfigError(
            f"config.{run.stage}.value_warmup_steps = {stage.value_warmup_steps} must be below steps = {steps}, or the "
            "policy learns nothing."
        )
    if pairs := _pairs_file(stage):
        check_apart(pairs, read_pairs(pairs)[0], planned_instances(run, "test"))
        if run.shared_settings(RetrievalSettings).attributes and "context_attributes" in planned_notes(run):
            raise ConfigError(
                f"contexts of config.{run.stage}.pairs have no attributes, but the generator reads contexts with them; "
                f"set {run.shared}.attributes = False and {run.shared}.emotion_share = 0."
            )
        return
    if stage.index:
        check_fusion(run)
        check_candidates(run, stage.index, run.shared_settings(RetrievalSettings).passages)
    for part in stage.rewards:
        if part.kind == "empathy":
            check_identifiers(run, "rewards.stages", part.stages)
        if part.goal == "f1":  # its expectations are computed from embedded contexts
            check_marked(run)
    asked = _sketch_contexts(len(TWO_ROWS), source=(8,), target=8)
    rollout = dataclasses.replace(_sketch_rollout(asked, stage.rollout.max_tokens, has_values=False), scores=None)
    data = run.plan.data
    told = [dataclasses.replace(row, notes={"situation": row.context[0]}) for row in TWO_ROWS]
    rows = functools.partial(own.example_rows, data.dir) if data.name == "jsonl" else lambda fields: told
    try_functions(stage.rewards, rows, rollout, later=planned_notes(run))


def _pairs_file(stage: PolicyTaskSettings) -> Path | None:
    """Returns the file of preferences that a stage learns from; None if it rates its own answers."""
    pairs = stage.pairs if isinstance(stage, PreferenceTaskSettings) else ""
    return expand(pairs) if pairs else None


def check_evaluation(stage: PolicyTaskSettings, run: RunContext) -> None:
    """Raises ConfigError if an evaluation cuts contexts, or its decoding needs what the policy does not have."""
    check_layout(run)
    _check_decoding(*decoding_of(run), stage, run.named(run.stage).settings.stage, run)


def _check_decoding(
    decoding: DecodeSettings, where: str, stage: PolicyTaskSettings, name: str, run: RunContext
) -> None:
    """Raises ConfigError if `decoding`, the section `where`, needs what the policy of the stage `name` lacks."""
    if decoding.rerank == "similarity" and getattr(run.named(stage.start_from).settings, "contrast", None) is not None:
        raise ConfigError(
            f"{where}.rerank = 'similarity' compares encodings from config.{stage.start_from}.contrast, which a "
            "policy does not keep; set another rerank, or contrast to None."
        )
    if stage.index:
        check_passages(decoding, where)
    elif decoding.rerank_exemplars:
        raise ConfigError(
            f"{where}.rerank_exemplars = {decoding.rerank_exemplars} counts exemplars, but config.{name} reads none; "
            f"set it to 0, or config.{name}.index to an index stage."
        )


def build_policy(stage: PolicyTaskSettings, run: RunContext) -> Assembly:
    parts = GeneratorParts.of(run, with_params=False)
    first = generator_params(parts, run, stage.start_from)
    train, answers = _training(parts, run, stage)
    reward = make_reward(stage.rewards if answers is None else (), run, parts.tokenizer, train.instances)
    held_out = _examples(parts, run, stage, "validation", stage.max_validation_examples)
    examples: Any = PolicyExamples(train, reward.goals, answers)
    if stage.whole_dialogues:
        examples = DialogueExamples(examples, stage.max_turns)
    stage = _with_shorter_warm_up(stage, len(examples), run)
    policy = make_policy(parts, stage, reward)
    frozen: dict[str, Any] = {"reward": reward.frozen()}
    # Validation rates no answers; its metric is the likelihood of the gold responses.
    validation = PolicyExamples(held_out, Goals.none(len(held_out)))
    replies = Replies(parts, run, stage, draw(held_out.instances, stage.replies) if stage.replies else [], first)
    calls: dict[str, Any] = {"on_refresh": replies, "on_end": replies}
    if parts.settings.lora is None:
        initial: Any = lambda params: {**params, "model": first["model"]}  # noqa: E731
        frozen["reference"] = {"model": parts.lowered(first["model"])}
        return Assembly(policy, examples, validation, frozen=frozen, initial=initial, **calls)
    task = parts.with_lora(policy)
    frozen = task.freeze({"model": first["model"]}, frozen)
    return Assembly(task, examples, validation, frozen=frozen, **calls)


def _with_shorter_warm_up(stage: PolicyTaskSettings, num_examples: int, run: RunContext) -> Any:
    """Scales the warm-up of the value head to the stage's number of steps on this corpus."""
    if not isinstance(stage, PpoTaskSettings):
        return stage
    loop = run.named(run.stage).loop
    steps = steps_on(run.plan.data, loop, num_examples)
    warm = min(round(stage.value_warmup_steps * steps / loop.steps), steps - 1)
    return dataclasses.replace(stage, value_warmup_steps=warm)


def policy_model(parts: GeneratorParts, params: Params, first: Params, kept_share: float) -> Params:
    r"""Returns the model of a policy's parameters, with adapters merged into the weights they were trained on.

    .. math:: \theta = \theta_{first} + s \, (\theta_{policy} - \theta_{first})

    Source: Wortsman et al. 2022 (WiSE-FT), Sec. 3; Ramé et al. 2024 (WARP), Sec. 3.3.

    `params` are of the policy's checkpoint, `first` are {"model"} of the start of training, `kept_share` is s.
    """
    if is_adapted(params):
        task = make_policy(parts, PpoTaskSettings(), Reward(()))
        model = parts.merged(task, params, {"model": first["model"]})["model"]
    else:
        model = params["model"]
    if kept_share == 1.0:
        return model
    return jax.tree.map(lambda begin, end: begin + kept_share * (end - begin), first["model"], model)


class Replies:
    """Keeps the answers to a few validation contexts: `replies/STEP.json`, with the initial model's as step 0."""

    def __init__(
        self, parts: GeneratorParts, run: RunContext, stage: PolicyTaskSettings, asked: list[Instance], first: Params
    ):
        self._parts, self._run, self._stage, self._asked, self._first = parts, run, stage, asked, first

    @functools.cached_property
    def _answerer(self) -> Answerer:
        """A single answerer, so that it compiles once."""
        passages = self._parts.settings.passages if self._stage.index else 0
        options = AnswerOptions(self._run.stage, "", (self._parts.longest_source(passages),))
        return _answerer(self._parts, self._run, self._stage, {}, options)

    def __call__(self, step: int, params: Params | None) -> None:
        if params is None or not self._asked:
            return
        distributed.make_once(self._path(0), lambda: self._keep(0, self._first["model"]))
        model = functools.partial(policy_model, self._parts, params, self._first, self._stage.kept_share)
        distributed.make_once(self._path(step), lambda: self._keep(step, model()))

    def _keep(self, step: int, model: Params) -> None:
        # Always from the host: arrays placed elsewhere would compile another program.
        self._answerer.take(jax.device_get({"model": model, "emotion": self._first["emotion"]}))
        # The same seed at every step, so that only the policy differs.
        made = self._answerer.respond(self._asked, batch_size=len(self._asked), seed=self._run.seed)
        write_json(self._path(step), [{"context": list(p.context), "response": p.response} for p in made])

    def _path(self, step: int) -> Path:
        return self._run.directory / "replies" / f"{step:06d}.json"


def _training(
    parts: GeneratorParts, run: RunContext, stage: PolicyTaskSettings
) -> tuple[ContextExamples, np.ndarray | None]:
    """Returns contexts to answer, or the contexts of preferences with their responses."""
    pairs = _pairs_file(stage)
    if pairs is None:
        return _examples(parts, run, stage, "train", stage.max_examples), None
    instances, rejected = read_pairs(pairs)
    check_apart(pairs, instances, load_instances(run, "test"))
    kept = draw_rows(len(instances), stage.max_examples)
    instances, rejected = [instances[row] for row in kept], [rejected[row] for row in kept]
    answers = given_answers(instances, rejected, parts.tokenizer, stage.rollout.max_tokens, parts.first_token)
    return ContextExamples(instances, parts.form(exemplars=False)), answers


def _examples(
    parts: GeneratorParts, run: RunContext, stage: PolicyTaskSettings, split: str, limit: int
) -> ContextExamples:
    instances = load_instances(run, split)
    if not stage.index:
        drawn = draw_dialogues(instances, limit) if stage.whole_dialogues else draw(instances, limit)
        return ContextExamples(drawn, parts.form(exemplars=False))
    retrieval, form = RetrievalParts.of(run, parts.tokenizer, with_params=False), parts.form()
    corpus = retrieval.corpus(instances if split == "train" else load_instances(run, "train"), form)
    embeddings = load_index(run.files.index(stage.index)).embeddings
    found = retrieval.searched(run, stage.index, split, corpus, form, limit, key_embeddings=embeddings)
    found.set_candidates(found.candidates[:, : parts.settings.passages])
    return found


def sketch_policy(stage: PolicyTaskSettings, run: RunContext, batch_size: int, length: int) -> Sketch:
    """Sketches an update on all answers to a batch, and the rollout that samples them, without the judges."""
    parts = GeneratorParts.of(run, planned=True)
    asked = batch_size * (stage.max_turns if stage.whole_dialogues else 1)
    given = _pairs_file(stage) is not None
    rows, tokens = asked * (2 if given else stage.rollout.num_samples), stage.rollout.max_tokens
    policy: Any = make_policy(parts, stage, Reward(()))
    source = (parts.settings.passages + parts.form().apart, length) if stage.index else (length,)
    contexts = functools.partial(_sketch_contexts, source=source, target=parts.settings.layout.max_target_tokens)
    rollout = _sketch_rollout(contexts(rows), tokens, has_values=policy.has_values)
    params = jax.eval_shape(policy.init, jax.random.key(0), rollout)
    learnt = jax.eval_shape(policy.credit, {}, rollout, jax.eval_shape(policy.init_memory))[0]
    asked_for = contexts(asked)
    if given:
        asked_for = dataclasses.replace(asked_for, answers=jax.ShapeDtypeStruct((asked, 2, tokens), jnp.int32))
    frozen: dict[str, Any] = {"reward": {}}
    if parts.settings.lora is None:
        frozen["reference"] = jax.eval_shape(parts.lowered, {"model": params["model"]})
    made = sketched(parts, policy, learnt, frozen)
    return dataclasses.replace(made, given=asked_for, answer_tokens=tokens)


def _sketch_contexts(rows: int, *, source: tuple[int, ...], target: int) -> PolicyBatch:
    """Returns contexts whose sources have the shape `source`, with placeholder levels."""
    inputs = shapes_of(LabelledBatch, B=rows, S=source[-1], T=target)
    if len(source) > 1:
        ids, mask = (jax.ShapeDtypeStruct((rows, *source), kind) for kind in (jnp.int32, jnp.bool_))
        inputs = dataclasses.replace(inputs, source=ids, source_mask=mask)
    return dataclasses.replace(shapes_of(PolicyBatch, B=rows, S=1, T=1, M=3), inputs=inputs)


def _sketch_rollout(batch: PolicyBatch, tokens: int, *, has_values: bool) -> Rollout:
    """Returns rated answers of `tokens` tokens each."""
    whole = shapes_of(Rollout, B=batch.row.shape[0], S=1, T=tokens, M=3)
    later = {"returns", "advantages", "kl_coefficient", "reference_point", "parts"}
    unknown = later if has_values else {*later, "values"}
    return dataclasses.replace(whole, batch=batch, **dict.fromkeys(unknown))


def answer_policy(stage: PolicyTaskSettings, run: RunContext, options: AnswerOptions) -> Answerer:
    """Builds the answerer of a finished stage; a stage that reads exemplars names their index itself."""
    parts = GeneratorParts.of(run, with_params=False).trained_at(run.at(options.stage))
    first = generator_params(parts, run, stage.start_from)
    model = policy_model(parts, load_params(run.files.stage(options.stage), options.params), first, stage.kept_share)
    # The emotion head is the fine-tuned one: rewards do not train it.
    return _answerer(parts, run, stage, {"model": parts.lowered(model), "emotion": first["emotion"]}, options)


def _answerer(
    parts: GeneratorParts, run: RunContext, stage: PolicyTaskSettings, params: Params, options: AnswerOptions
) -> Answerer:
    """Builds the answerer with the exemplars of training: from the index stage, by the encoder that built it."""
    task = generator_of(parts, fused=bool(stage.index), heads=taught_heads(stage, run))
    if not stage.index:
        return answerer_of(parts, task, params, context_examples(parts, options.buckets), options)
    search = ExemplarSearch.of(run, parts, stage.index, buckets=options.buckets)
    return answerer_of(parts, task, params, search, options)


def trained_policy(stage: PolicyTaskSettings, run: RunContext, adapters: bool) -> Trained:
    """Returns the policy's generator of the trained stage of `run`, without its heads; `adapters` are refused."""
    saved = load_params(run.directory)
    if adapters:
        raise ConfigError(
            f"stage {run.stage!r} has no adapters that sit on pretrained weights: export it with --lora=merged."
        )
    parts = GeneratorParts.of(run, with_params=False)
    model = policy_model(parts, saved, generator_params(parts, run, stage.start_from), stage.kept_share)
    passages = parts.settings.passages if stage.index else 0
    return generator_to_export(parts, run.stage, model, passages=passages)
