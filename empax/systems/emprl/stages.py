"""EmpRL's stages: from settings and the work directory to policies with their examples and rewards."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from empax.core import distributed
from empax.core.config import ConfigError, to_settings
from empax.core.files import write_json
from empax.core.run import Assembly, RunContext, Sketch, TaskSpec, cache_dir
from empax.core.sharding import local_mesh
from empax.core.types import Instance, Params
from empax.data.exemplars import ContextExamples, LabelledBatch
from empax.data.store import check_candidates, check_prepared, load_instances
from empax.models.heads import EMOTION_HEAD
from empax.retrieval.index import load_index
from empax.systems.attributes import IdentifierJudge, IdentifierStage, judge_stage, load_judge
from empax.systems.attributes.identifier import check_mechanisms
from empax.systems.dialogue.checks import TWO_ROWS, dialogue_settings
from empax.systems.dialogue.generator import Generator
from empax.systems.dialogue.parts import Parts
from empax.systems.dialogue.responder import Responder, Retrieval
from empax.systems.dialogue.stages import GENERATOR, corpus_encoder, searched, shape, sketch_labelled
from empax.systems.emprl.functions import try_functions
from empax.systems.emprl.rewards import Reward, check_contexts, make_reward
from empax.systems.emprl.rollouts import DialogueExamples, JudgedContexts, PolicyBatch, PolicyExamples, Rollout
from empax.systems.emprl.settings import GrpoStage, PolicyStage, PpoStage
from empax.systems.emprl.tasks import ALGORITHMS, Grpo, Ppo
from empax.training.checkpoint import load_params


def generator_of(parts: Parts, *, fused: bool) -> Generator:
    """The run's generator as a task; `fused`, reading several passages."""
    settings = parts.settings
    model = parts.fusion if fused else parts.reader
    return Generator(model, EMOTION_HEAD, parts.decoder(settings.decoding), emotion_weight=0.0)


def make_policy(parts: Parts, stage: PolicyStage, reward: Reward) -> Ppo | Grpo:
    generator = generator_of(parts, fused=bool(stage.index))
    rolled = dataclasses.replace(generator, decoder=parts.decoder(stage.rollout))
    algorithm: Any = ALGORITHMS[type(stage)]  # each with the settings that it belongs to
    return algorithm(rolled, reward, stage)


def first_params(parts: Parts, run: RunContext, stage: str) -> Params:
    """{"model", "emotion"} of the stage that a policy begins with; of a joint stage, its generator."""
    params = parts.stage_params(run, stage)
    params = params.get("generator", params)
    if "model" not in params:
        raise ConfigError(
            f"config.{run.stage}.start_from = {stage!r} trains no generator; name a stage of the tasks 'generator' or "
            "'reg.joint'."
        )
    return params


def check_policy(stage: PolicyStage, run: RunContext) -> None:
    """Whether the stages that a policy begins with are there, and the functions that reward it work.

    Raises:
      ConfigError: they are not, or a function is not there or fails on two rows.
    """
    check_prepared(run)
    run.earlier("start_from", stage.start_from, tasks=("generator", "reg.joint"))
    if stage.index:
        check_candidates(run, stage.index, ("train", "validation"), dialogue_settings(run).passages)
    for part in stage.rewards:
        if part.kind == "empathy":
            _check_identifiers(part.stages, run)
    two, tokens = len(TWO_ROWS), stage.rollout.max_tokens
    inputs = LabelledBatch(
        source=shape(two, 8), source_mask=shape(two, 8, kind=bool), target=shape(two, 8),
        target_mask=shape(two, 8, kind=bool), valid=shape(two, kind=bool), emotion=shape(two),
    )  # fmt: skip
    rollout = _sketch_rollout(_policy_batch(inputs, two), two, tokens, has_values=False)
    unknown = dict.fromkeys(("scores", "advantages", "kl_coefficient"))
    try_functions(stage.rewards, TWO_ROWS, dataclasses.replace(rollout, **unknown))


def _check_identifiers(stages: Sequence[str], run: RunContext) -> None:
    """Raises ConfigError unless `stages` train identifiers that can reward together."""
    found = []
    for name in stages:
        run.earlier("rewards.stages", name, tasks=("attributes.identifier",))
        found.append(judge_stage(run, name))
    levelled = [mechanism for judge in found for mechanism in judge.mechanisms]
    check_mechanisms(levelled)
    check_contexts(stages, [judge.max_context_tokens for judge in found if isinstance(judge, IdentifierStage)])


def build_policy(stage: PolicyStage, run: RunContext) -> Assembly:
    parts = Parts.of(run, with_params=False)
    first = first_params(parts, run, stage.start_from)

    def judges(name: str) -> IdentifierJudge:
        judge = load_judge(run, name)
        if not isinstance(judge, IdentifierJudge):
            raise ConfigError(f"config.{name} trains no identifiers; set its task to 'attributes.identifier'.")
        return judge

    train = _examples(parts, run, stage, "train", stage.max_examples)
    reward = make_reward(
        stage.rewards,
        tokenizer=parts.tokenizer,
        instances=train.instances,
        judges=judges,
        encoder=lambda: corpus_encoder(run, ""),
        responses=lambda: [instance.response for instance in load_instances(run, "train")],
    )
    held_out = _examples(parts, run, stage, "validation", stage.max_validation_examples)
    examples: Any = PolicyExamples(train, reward.judged(train.instances, cache_dir() / "levels"))
    if stage.whole_dialogues:
        examples = DialogueExamples(examples, stage.max_turns)
    policy = make_policy(parts, stage, reward)
    frozen: dict[str, Any] = {"reward": reward.frozen()}
    # Nobody is rated there: what is watched is the likelihood of the gold responses.
    validation = PolicyExamples(held_out, JudgedContexts.nobody(len(held_out)))
    replies = Replies(parts, run, stage, held_out.instances[: stage.replies], first)
    calls: dict[str, Any] = {"on_refresh": replies, "on_end": replies}
    if parts.settings.lora is None:
        initial: Any = lambda params: {**params, "model": first["model"]}  # noqa: E731
        frozen["reference"] = {"model": parts.lowered(first["model"])}
        return Assembly(policy, examples, validation, frozen=frozen, initial=initial, **calls)
    task = parts.with_lora(policy)
    frozen = task.freeze({"model": first["model"]}, frozen)
    return Assembly(task, examples, validation, frozen=frozen, **calls)


def policy_settings(run: RunContext, stage: str) -> PolicyStage:
    """Settings of a stage of the tasks "ppo" or "grpo"; ConfigError if its section cannot be read."""
    section = run.section(stage)
    cls = TASKS[section["task"].rpartition(".")[2]].settings
    fields = {field.name for field in dataclasses.fields(cls)}
    return to_settings(cls, {k: v for k, v in section.items() if k in fields}, where=f"config.{stage}")


def policy_model(parts: Parts, params: Params, first: Params, kept_share: float) -> Params:
    r"""The model in the parameters of a policy; adapters are merged into the weights that they were trained on.

    .. math:: \theta = \theta_{first} + s \, (\theta_{policy} - \theta_{first})

    Source: Wortsman et al. 2022 (WiSE-FT), Sec. 3; Ramé et al. 2024 (WARP), Sec. 3.3.

    Args:
      parts: of the run.
      params: of the policy's checkpoint.
      first: {"model"}, what training began with.
      kept_share: s in (0, 1], see PolicyStage.
    """
    if "adapters" in params:
        task = make_policy(parts, PpoStage(), Reward(()))
        model = parts.merged(task, params, {"model": first["model"]})["model"]
    else:
        model = params["model"]
    if kept_share == 1.0:
        return model
    return jax.tree.map(lambda begin, end: begin + kept_share * (end - begin), first["model"], model)


class Replies:
    """Keeps what the policy answers to a few validation contexts, as training goes on: `replies/STEP.json`.

    The first call also asks the model that training began with, as step 0.
    """

    def __init__(self, parts: Parts, run: RunContext, stage: PolicyStage, instances: Sequence[Instance], first: Params):
        self._parts, self._run, self._stage, self._first = parts, run, stage, first
        self._instances = instances
        self._responder: Responder | None = None

    def __call__(self, step: int, params: Params | None) -> None:
        if params is None or not self._instances:
            return
        distributed.make_once(self._path(0), lambda: self._keep(0, self._first["model"]))
        distributed.make_once(
            self._path(step),
            lambda: self._keep(step, policy_model(self._parts, params, self._first, self._stage.kept_share)),
        )

    def _keep(self, step: int, model: Params) -> None:
        if self._responder is None:  # one, so that it compiles once
            retrieval = _retrieval(self._parts, self._run, self._stage) if self._stage.index else None
            generator = generator_of(self._parts, fused=bool(self._stage.index))
            longest = (self._parts.settings.layout.max_source_tokens,)
            self._responder = Responder(self._parts, generator, {}, retrieval, longest)
        # From the host always: arrays that lie elsewhere would be another program to compile.
        self._responder.take(jax.device_get({"model": model, "emotion": self._first["emotion"]}))
        # The same draws at every step: what differs is the policy.
        made = self._responder.respond(self._instances, batch_size=len(self._instances), seed=self._run.seed)
        write_json(self._path(step), [{"context": list(p.context), "response": p.response} for p in made])

    def _path(self, step: int) -> Path:
        return self._run.directory / "replies" / f"{step:06d}.json"


def _examples(parts: Parts, run: RunContext, stage: PolicyStage, split: str, limit: int) -> ContextExamples:
    instances = load_instances(run, split)
    if not stage.index:
        return ContextExamples(instances[: limit or None], parts.form(exemplars=False))
    corpus = parts.corpus(instances if split == "train" else load_instances(run, "train"))
    embeddings = load_index(run.files.index(stage.index)).embeddings
    found = searched(parts, run, stage.index, split, corpus, limit, key_embeddings=embeddings)
    found.set_candidates(found.candidates[:, : parts.settings.passages])
    return found


def sketch_policy(stage: PolicyStage, run: RunContext, batch_size: int, length: int) -> Sketch:
    """Of an update on all answers to a batch, and the rollout that makes them; who judges is not in it."""
    parts = Parts.of(run, planned=True)
    asked = batch_size * (stage.max_turns if stage.whole_dialogues else 1)
    rows, tokens = asked * stage.rollout.num_samples, stage.rollout.max_tokens
    policy = make_policy(parts, stage, Reward(()))
    answers = _sketch_contexts(parts, stage, rows, length)
    rollout = _sketch_rollout(answers, rows, tokens, has_values=policy.has_values)
    params = jax.eval_shape(policy.init, jax.random.key(0), rollout)
    frozen: dict[str, Any] = {"reward": {}}
    task: Any = policy
    if parts.settings.lora is None:
        frozen["reference"] = jax.eval_shape(parts.lowered, {"model": params["model"]})
    else:
        task = parts.with_lora(policy)
        frozen = jax.eval_shape(task.freeze, {"model": params["model"]}, frozen)
    return Sketch(task, rollout, frozen, given=_sketch_contexts(parts, stage, asked, length), answer_tokens=tokens)


def _sketch_contexts(parts: Parts, stage: PolicyStage, rows: int, length: int) -> PolicyBatch:
    inputs = sketch_labelled(parts, rows, length)
    if stage.index:
        passages = (rows, parts.settings.passages, length)
        inputs = dataclasses.replace(inputs, source=shape(*passages), source_mask=shape(*passages, kind=bool))
    return _policy_batch(inputs, rows)


def _policy_batch(inputs: Any, rows: int) -> PolicyBatch:
    return PolicyBatch(
        inputs=inputs,
        row=shape(rows),
        context=shape(rows, 1),
        context_mask=shape(rows, 1, kind=bool),
        wanted=shape(rows, 3, 3, kind=jnp.float32),
        turn=shape(rows),
        merit=shape(rows, kind=jnp.float32),
    )


def _sketch_rollout(batch: PolicyBatch, rows: int, tokens: int, *, has_values: bool) -> Rollout:
    """Credited answers of `tokens` tokens each."""
    ids, mask, each = shape(rows, tokens), shape(rows, tokens, kind=bool), shape(rows, tokens, kind=jnp.float32)
    row = shape(rows, kind=jnp.float32)
    rollout = Rollout(batch, ids, mask, each, each, scores=row, advantages=row, kl_coefficient=row)
    if not has_values:
        return rollout
    return dataclasses.replace(rollout, values=each, advantages=each, returns=each, policy_weight=row)


TASKS = {
    "generator": GENERATOR,
    "ppo": TaskSpec(PpoStage, check_policy, build_policy, sketch_policy),
    "grpo": TaskSpec(GrpoStage, check_policy, build_policy, sketch_policy),
}


def check_responder(run: RunContext, *, stage: str, index: str) -> None:
    """Raises ConfigError unless `config.STAGE.stage` trains what answers, before."""
    del index  # a policy that reads exemplars says itself where they come from
    run.earlier("stage", stage, tasks=("generator", "ppo", "grpo"))


def load_responder(run: RunContext, *, stage: str, index: str, buckets: Sequence[int]) -> Responder:
    """The generator of a finished stage, fine-tuned or reinforced.

    Args:
      run: whose work directory holds the stages.
      stage: of the tasks "generator", "ppo" or "grpo".
      index: unused; a policy that reads exemplars says itself where they come from.
      buckets: source lengths to pad to.

    Raises:
      ConfigError: the stage trains something else.
    """
    del index
    parts = Parts.of(run, with_params=False)
    kind = run.section(stage)["task"].rpartition(".")[2]
    if kind == "generator":
        params = parts.lowered(parts.stage_params(run, stage))
        return Responder(parts, generator_of(parts, fused=False), params, None, buckets)
    if kind not in ("ppo", "grpo"):
        raise ConfigError(
            f"config.{run.stage}.stage = {stage!r} trains {kind!r}; it must train 'generator', 'ppo' or 'grpo'."
        )
    settings = policy_settings(run, stage)
    # The emotion head is the fine-tuned one: rewards do not teach it.
    first = first_params(parts, run, settings.start_from)
    model = policy_model(parts, load_params(run.files.stage(stage)), first, settings.kept_share)
    params = {"model": parts.lowered(model), "emotion": first["emotion"]}
    retrieval = _retrieval(parts, run, settings) if settings.index else None
    return Responder(parts, generator_of(parts, fused=bool(settings.index)), params, retrieval, buckets)


def _retrieval(parts: Parts, run: RunContext, settings: PolicyStage) -> Retrieval:
    """The exemplars that the policy was trained with: of the index stage, and of the encoder that made it."""
    encoder = corpus_encoder(run, run.section(settings.index)["encoder"])
    index = load_index(run.files.index(settings.index), encoder_hash=encoder.hash, mesh=local_mesh())
    return Retrieval(encoder, index, parts.corpus(load_instances(run, "train")))
