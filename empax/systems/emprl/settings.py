"""Settings of EmpRL's stages, besides those that all systems share."""

from __future__ import annotations

import dataclasses
from typing import Literal

from empax.core.config import ConfigError, check_numbers
from empax.decoding.settings import DecodeSettings
from empax.systems.emprl.advantages import Form
from empax.systems.emprl.ppo import Level, Reduction


@dataclasses.dataclass(frozen=True)
class RewardSettings:
    """One part of the reward; the parts are summed.

    Attributes:
      kind: "empathy" (Eq. 2 to 5: how likely the response has the gold response's levels), "novelty" (its contribution
        to Distinct-2, see `expectations.Novelty`), "compiled" (a function of arrays) or "text" (a function of strings).
      weight: factor of the part; below 0 the part is a penalty.
      goal: for "empathy". "gold": the levels of the gold response (Eq. 2 to 5); "f1": the levels that add most to the
        expected weighted F1, given the context (`systems.emprl.expectations`); "balanced": the levels of the gold
        response, rare ones with a higher reward, so that without knowledge of it no level earns more than another.
      stages: for "empathy": the stages that trained the identifiers, together one for each mechanism.
      function: for the other kinds: "module:name", importable. "compiled" is called as (rollout) -> [B], jitted, with a
        `systems.emprl.rollouts.Rollout`, or as (params, rollout) if it has an attribute `params`, a tree of arrays;
        "text" as (contexts, responses, references, **fields) -> [B], see `core.text_functions.call_on_texts`.
      shift_penalty: for "empathy" on whole dialogues: penalty for a change of level from one listener turn to the next,
        beyond the change in the gold responses; 0 = each turn is rewarded alone.
    """

    kind: Literal["empathy", "novelty", "compiled", "text"] = "empathy"
    weight: float = 1.0
    goal: Literal["gold", "f1", "balanced"] = "gold"
    stages: tuple[str, ...] = ("identifiers",)
    function: str = ""
    shift_penalty: float = 0.0

    def __post_init__(self) -> None:
        if (self.kind in ("empathy", "novelty")) == bool(self.function):
            raise ConfigError(
                f"a reward of kind = {self.kind!r} has function = {self.function!r}; 'compiled' and 'text' need "
                "'module:name', 'empathy' and 'novelty' take none."
            )
        if self.kind == "empathy" and not self.stages:
            raise ConfigError("a reward of kind = 'empathy' has stages = (); name the stages of the identifiers.")
        check_numbers(self, "weight")
        check_numbers(self, "shift_penalty", least=0)
        for name in ("shift_penalty", "goal", "stages"):
            if self.kind != "empathy" and getattr(self, name) not in (getattr(RewardSettings, name), ()):
                raise ConfigError(f"{name} goes with kind = 'empathy', not with {self.kind!r}.")
        if self.goal != "gold" and self.shift_penalty:
            raise ConfigError(f"shift_penalty = {self.shift_penalty} goes with goal = 'gold', not with {self.goal!r}.")


@dataclasses.dataclass(frozen=True)
class KlSettings:
    """The KL penalty for moving away from the reference (Eq. 6 and 8).

    Attributes:
      coefficient: initial beta; 0 = the paper's "w/o KL".
      controller: "fixed" (the paper's text), or "adaptive" (its runs).
      target: for "adaptive": target KL in nats per response.
      horizon: for "adaptive": number of responses over which it acts.
    """

    coefficient: float = 0.2
    controller: Literal["fixed", "adaptive"] = "adaptive"
    target: float = 6.0
    horizon: float = 10_000.0

    def __post_init__(self) -> None:
        check_numbers(self, "coefficient", least=0)
        check_numbers(self, "target", "horizon", above=0)


_ROLLOUT = DecodeSettings(method="sample", max_tokens=29, min_tokens=4, temperature=0.9, top_k=20)
_GROUPS = dataclasses.replace(_ROLLOUT, num_samples=4)


@dataclasses.dataclass(frozen=True)
class PolicyTaskSettings:
    """Settings shared by all algorithms that learn from a policy's answers.

    Attributes:
      start_from: the stage whose generator is the initial policy and the reference.
      index: the index stage that supplies exemplars to a generator that reads several passages; empty = no exemplars.
      rollout: decoding of sampled responses. Log-probabilities are those of the policy, neither tempered nor truncated.
      rewards: the parts of the reward.
      likelihood_weight: weight of the gold responses' negative log-likelihood per token in the loss: it keeps the
        policy close to people's answers (PPO-ptx; Ouyang et al. 2022, Eq. 2).
      likelihood_focus: factor f in the weight exp(f m) of gold responses, with their merit m: their own reward, in
        standard deviations (advantage-weighted regression; Peng et al. 2019). 0 = equal weights. It needs a reward of
        kind "empathy" whose goal is not "gold", by which all gold responses earn the same.
      kept_share: interpolation from the initial model to the trained one, for answers and export; 1 = the trained one.
        On that path, reward is gained early, and its cost in likelihood comes late.
      mask_first_token: omits each response's first token, as EmpRL's runs did (see `systems.emprl.advantages`).
      guard_tolerance: maximum deviation of the ratio from 1 and of the KL from 0 before the first update; both are
        means over tokens of absolute values.
      whole_dialogues: an example is a dialogue with all its listener turns; `batch_size` then counts dialogues.
      max_turns: maximum listener turns of a whole dialogue; later ones are omitted.
      max_examples: maximum number of training contexts, also of whole dialogues; 0 = all.
      max_validation_examples: the same, for the validation likelihood of the gold responses.
      replies: validation contexts whose replies are kept for the report: first, at every `refresh_every_steps`, last.
    """

    start_from: str = "generator"
    index: str = ""
    rollout: DecodeSettings = _ROLLOUT
    rewards: tuple[RewardSettings, ...] = (RewardSettings(),)
    likelihood_weight: float = 0.0
    likelihood_focus: float = 0.0
    kept_share: float = 1.0
    mask_first_token: bool = False
    guard_tolerance: float = 1e-3
    whole_dialogues: bool = False
    max_turns: int = 3
    max_examples: int = 0
    max_validation_examples: int = 500
    replies: int = 4

    def __post_init__(self) -> None:
        rollout = self.rollout
        for name, wrong, why in (
            ("method", rollout.method != "sample", "'sample': a policy explores"),
            ("more_eos_ids", rollout.more_eos_ids, "empty: training responses end with the tokenizer's end token"),
            ("end_at_limit", rollout.end_at_limit, "False: a policy would learn to stop where max_tokens cuts answers"),
            ("rerank", rollout.rerank, "empty: a policy learns from all answers of a group"),
        ):
            if wrong:
                raise ConfigError(f"rollout.{name} = {getattr(rollout, name)!r} must be {why}.")
        check_numbers(self, "guard_tolerance", above=0)
        check_numbers(self, "likelihood_weight", "likelihood_focus", least=0)
        check_numbers(self, "kept_share", above=0, most=1)
        check_numbers(self, "max_turns", least=1)
        check_numbers(self, "max_examples", "max_validation_examples", "replies", least=0)
        if self.index and self.whole_dialogues:
            raise ConfigError("whole_dialogues and index do not go together: exemplars belong to single turns.")
        if sum(reward.kind == "empathy" for reward in self.rewards) > 1:
            raise ConfigError("rewards has two parts of kind = 'empathy'; give both stages to one.")
        if self.max_turns != PolicyTaskSettings.max_turns and not self.whole_dialogues:
            raise ConfigError(f"max_turns = {self.max_turns} needs whole_dialogues = True.")
        if self.likelihood_focus and not self.likelihood_weight:
            raise ConfigError(f"likelihood_focus = {self.likelihood_focus} needs a likelihood_weight above 0.")
        if self.likelihood_focus and not any(part.kind == "empathy" and part.goal != "gold" for part in self.rewards):
            raise ConfigError(
                f"likelihood_focus = {self.likelihood_focus} needs a reward of kind 'empathy' with goal 'f1' or "
                "'balanced': with any other, all gold responses have the same merit."
            )
        if any(reward.shift_penalty for reward in self.rewards) and not self.whole_dialogues:
            raise ConfigError("shift_penalty needs whole_dialogues = True: single turns have no shifts.")

    def check_groups(self) -> None:
        """Raises ConfigError unless several responses to a context can be compared."""
        if self.rollout.num_samples < 2:
            raise ConfigError(f"rollout.num_samples = {self.rollout.num_samples} must be at least 2: a group.")
        if any(reward.shift_penalty for reward in self.rewards):
            raise ConfigError(
                "shift_penalty goes with PPO alone: in a group, other answers to the same turn would come between "
                "those of a dialogue."
            )


@dataclasses.dataclass(frozen=True)
class RatioTaskSettings(PolicyTaskSettings):
    """Settings shared by PPO and GRPO.

    Attributes:
      kl: the KL penalty.
      normalize_scores: standardizes scores by the running mean and standard deviation of all scores so far.
      clip: epsilon of Eq. 14.
      epsilon_high: maximum rise of a ratio above 1; None = `clip`.
      entropy_weight: weight of a bonus for the policy's entropy.
      reduction: see `systems.emprl.ppo.reduce_tokens`; the paper prints "sequences". For GRPO, "sequence_means" is its
        paper's, "tokens" DAPO's, "sequences" Dr. GRPO's.
    """

    kl: KlSettings = dataclasses.field(default_factory=KlSettings)
    normalize_scores: bool = True
    clip: float = 0.2
    epsilon_high: float | None = None
    entropy_weight: float = 0.0
    reduction: Reduction = "tokens"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_numbers(self, "clip", "epsilon_high", above=0)
        check_numbers(self, "entropy_weight", least=0)


@dataclasses.dataclass(frozen=True)
class PpoTaskSettings(RatioTaskSettings):
    """Stage 2 of EmpRL: PPO.

    Attributes:
      gamma, lam: discount and lambda of the advantages (Eq. 9 and 10).
      advantages: "sound", or "paper_literal", which is Eq. 9 as printed.
      whiten_rewards: scales token rewards, including the KL, to variance 1 and keeps their mean.
      value_weight: weight of the value loss (Eq. 13).
      value_hidden: width of the value head's hidden layer; 0 = a linear head.
      value_sees_levels: the value head also reads the levels that the reward asks for. Values are not needed after
        training, so they may use what the policy must not (Pinto et al. 2018, Sec. III). Without a reward of kind
        "empathy" there are no levels, and this has no effect.
      value_clip: clip range of the values; None = no clipping (Eq. 15 as printed).
      value_warmup_steps: initial batches that train the value head alone; the other parameters and their optimizer
        state do not change.
    """

    gamma: float = 1.0
    lam: float = 0.95
    advantages: Form = "sound"
    whiten_rewards: bool = True
    value_weight: float = 0.1
    value_hidden: int = 0
    value_sees_levels: bool = False
    value_clip: float | None = 0.2
    value_warmup_steps: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_numbers(self, "gamma", "lam", least=0, most=1)
        check_numbers(self, "value_weight", "value_warmup_steps", "value_hidden", least=0)
        check_numbers(self, "value_clip", above=0, hint="None switches clipping off")
        if self.rollout.num_samples != 1:
            raise ConfigError("rollout.num_samples must be 1: PPO has a value head, groups are GRPO's.")


@dataclasses.dataclass(frozen=True)
class GrpoTaskSettings(RatioTaskSettings):
    """GRPO, without a value head: it compares `rollout.num_samples` responses to each context with each other.

    The loss has the KL by estimator k3 (Shao et al. 2024, Eq. 4), logged as `token_kl`; the KL of whole responses, by
    k1, is logged as `kl` and controls an adaptive coefficient.

    Attributes:
      scale_rewards: whether advantages are divided by the std of their group; False is Dr. GRPO.
      importance_sampling_level: "sequence" is GSPO: one ratio for a whole response.
    """

    rollout: DecodeSettings = _GROUPS
    scale_rewards: bool = True
    importance_sampling_level: Level = "token"
    reduction: Reduction = "sequence_means"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_groups()


@dataclasses.dataclass(frozen=True)
class PreferenceTaskSettings(PolicyTaskSettings):
    """Preferences in place of advantages: the best against the worst of `rollout.num_samples` responses.

    Attributes:
      loss: "dpo", "ipo", or "kto", which takes single responses, wanted if they are better than the mean.
      beta: strength of the tie to the reference; the smaller, the farther the policy moves.
      pairs: a file of preferences, such as people's votes (`empax rate pairs`), in place of sampled responses rated by
        `rewards`: JSON lines with `context` (a list of turns), `chosen` and `rejected`, which are cut to
        `rollout.max_tokens`.
    """

    rollout: DecodeSettings = _GROUPS
    loss: Literal["dpo", "ipo", "kto"] = "dpo"
    beta: float = 0.1
    pairs: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_groups()
        check_numbers(self, "beta", above=0)
        if self.pairs and (self.loss == "kto" or self.index or self.whole_dialogues):
            odd = "loss = 'kto'" if self.loss == "kto" else f"index = {self.index!r}" if self.index else "dialogues"
            raise ConfigError(
                f"pairs and {odd} do not go together: responses from a file have no KL, exemplars or dialogue; set "
                "pairs = '', or loss = 'dpo', index = '' and whole_dialogues = False."
            )
        if not self.pairs and not self.rewards:
            raise ConfigError(
                "rewards = () rates all responses alike, so that none is preferred and nothing is learnt; name a "
                "reward, or a file of pairs."
            )
        if self.pairs and self.rewards not in ((), PolicyTaskSettings.rewards):
            raise ConfigError(f"rewards rate sampled responses, but those of pairs = {self.pairs!r} come from a file.")
