"""Settings of ReflectDiffu: those shared by its stages, and those of each stage."""

from __future__ import annotations

import dataclasses
from typing import Literal

from empax.core.config import ConfigError, check_numbers
from empax.decoding.settings import DecodeSettings
from empax.interop.pretrained_encoders import EncoderSettings
from empax.parts.generator.settings import check_no_exemplars
from empax.parts.generator.word_level import WordLevelSettings
from empax.systems.reflectdiffu.diffusion import Schedule
from empax.systems.reflectdiffu.labels import INTENTS
from empax.systems.reflectdiffu.model import Gate, Recognition


@dataclasses.dataclass(frozen=True)
class ReflectSettings:
    """Settings shared by all stages.

    Attributes:
      max_context_tokens: maximum tokens of a context for the generator; the newest are kept.
      max_piece_tokens: maximum pieces of a context for the annotator of reasons and the classifier of intents.
      max_target_tokens: maximum tokens of a response, including the end-of-sequence token.
    """

    model: WordLevelSettings = dataclasses.field(default_factory=WordLevelSettings)
    decoding: DecodeSettings = dataclasses.field(default_factory=DecodeSettings)
    max_context_tokens: int = 100
    max_piece_tokens: int = 100
    max_target_tokens: int = 50

    def __post_init__(self) -> None:
        check_numbers(self, "max_context_tokens", "max_piece_tokens", "max_target_tokens", least=2)
        check_no_exemplars(self.decoding)
        if self.decoding.reads_source:
            raise ConfigError(
                "encoder_no_repeat_ngram and encoder_repetition_penalty count the source's words, which ReflectDiffu "
                "copies; set decoding.encoder_no_repeat_ngram to 0 and decoding.encoder_repetition_penalty to 1."
            )


@dataclasses.dataclass(frozen=True)
class IntentTaskSettings:
    """Settings of the classifier of intents; it reads the context alone, since it runs before there is a response."""

    encoder: EncoderSettings = dataclasses.field(default_factory=EncoderSettings)
    max_validation_examples: int = 1000

    def __post_init__(self) -> None:
        check_numbers(self, "max_validation_examples", least=0)


_POLICY = ("policy_weight", "entropy_weight", "reward")
_UNREAD = (
    ("experts", "none", ("contrastive_weight", "temperature")),
    ("emotion_weight", 0.0, ("contrastive_weight", "temperature")),
    ("contrastive_weight", 0.0, ("temperature",)),
    ("second_intent", False, ("actions", "num_actions", *_POLICY, "first_weight", "final_prior")),
    ("constant_second", True, ("actions", "num_actions", *_POLICY)),
    ("policy_weight", 0.0, _POLICY[1:]),
    ("twice_weight", 0.0, (*_POLICY, "first_weight", "noise_error", "kl_weight")),
    ("mimicry", False, ("diffusion", "state_time", "restore", "noise_error", "recognition", "kl_weight")),
    ("copying", False, ("slots",)),
)
"""A setting, a value of it, and the settings that are not read with that value."""

_SCHEDULE = Schedule()


@dataclasses.dataclass(frozen=True)
class GeneratorTaskSettings:
    """Settings of the generator and all modules trained jointly with it (Eq. 12).

    Attributes:
      reasons: the stage that trained the annotator; empty = w/o ERA.
      reason_tags: words tagged as reasons for the encoder: those that the annotator "marked", "none", or as many random
        words of the context, "shuffled". The last two are controls: the annotator's representations stay.
      intents: the stage that trained the classifier of intents; empty = a uniform distribution.
      experts: the gate of the experts (`model.Gate`); "none" = w/o C-Experts: a linear head, no contrastive loss.
      contrastive_weight: weight of NT-Xent, relative to the cross-entropy of emotions.
      temperature: temperature of NT-Xent; ours, as the paper has none.
      classifier_share: alpha of Eq. 5; ours.
      first_intent: "mixed", or Eq. 5 as "printed".
      first_weight: weight of the first intent's cross-entropy with the listener's intent; ours. 0 = only the final
        intent learns from labels (Eq. 10).
      final_prior: whether the logarithm of the classifier's distribution is added to the final intent's logits; ours.
      second_intent: False = w/o intent twice: the first intent is the final one.
      constant_second: whether the second intent is uniform for all contexts: a control for the policy's contribution to
        the correcting layer.
      actions: the reference intents of an emotion: the most common in training, or the paper's Table 1.
      num_actions: n, the number of reference intents.
      policy_weight: weight of the policy's loss, which Eq. 10 and 12 lack; ours. 0 = follow them.
      entropy_weight: weight of the policy's entropy, in nats, beside rewards from 0 to 1; ours. With 0 the policy stops
        exploring early, whatever the rewards.
      reward: "label", 1 for the intent of the response and 0 for others, "alignment" (Eq. 9, with the chosen intent's
        embedding), or "empathy", EmpRL's reward of the reply with the chosen intent.
      judges: for "empathy": the stages that trained the identifiers, together one for each mechanism.
      mimicry: False = w/o EMU: the decoder attends to the encoder's states.
      diffusion: betas and number of steps.
      state_time: time in the schedule of the noisy summary from which emotions are restored; ours.
      restore: the "estimate" from the predicted noise, or Eq. 7 as "printed", step by step.
      noise_error: whether the denoisers learn to predict the noise; Eq. 10 has only their KL.
      recognition: inputs of the posterior of the denoisers' latent (`systems.reflectdiffu.model`).
      kl_weight: weight of the denoisers' KL. The KL is a sum over dimensions and the error a mean, so 2 / d_model is
        the weight of the variational bound. Eq. 10 has 1.
      latent, hidden: dimensions of the denoisers' latent and hidden layers; ours.
      copying: whether the decoder has a pointer.
      slots: maximum distinct unknown words of a context that the pointer can copy; the newest have a slot, others are
        unknown.
      intent_start: whether the decoder starts from the final intent; ours, since Eq. 11 gives the decoder no intent.
      emotion_weight, twice_weight, response_weight: delta, zeta and eta of Eq. 12; ours, equal.
      max_validation_examples: maximum examples of validation; 0 = all.
    """

    reasons: str = "reasons"
    reason_tags: Literal["marked", "none", "shuffled"] = "marked"
    intents: str = "intents"
    experts: Gate | Literal["none"] = "row"
    contrastive_weight: float = 1.0
    temperature: float = 0.07
    classifier_share: float = 0.5
    first_intent: Literal["mixed", "printed"] = "mixed"
    first_weight: float = 1.0
    final_prior: bool = True
    second_intent: bool = True
    constant_second: bool = False
    actions: Literal["train_statistics", "table_1"] = "train_statistics"
    num_actions: int = 3
    policy_weight: float = 0.1
    entropy_weight: float = 0.1
    reward: Literal["label", "alignment", "empathy"] = "label"
    judges: tuple[str, ...] = ()
    mimicry: bool = True
    diffusion: Schedule = _SCHEDULE
    state_time: int = 200
    restore: Literal["estimate", "printed"] = "estimate"
    noise_error: bool = True
    recognition: Recognition = "clean"
    kl_weight: float = 2 / 300
    latent: int = 64
    hidden: int = 300
    copying: bool = True
    slots: int = 20
    intent_start: bool = True
    emotion_weight: float = 1.0
    twice_weight: float = 1.0
    response_weight: float = 1.0
    max_validation_examples: int = 1000

    def __post_init__(self) -> None:
        check_numbers(self, "temperature", above=0)
        check_numbers(self, "classifier_share", least=0, most=1)
        check_numbers(self, "num_actions", least=2, most=len(INTENTS))
        check_numbers(self, "latent", "hidden", least=1)
        weights = ("contrastive_weight", "first_weight", "policy_weight", "kl_weight", "emotion_weight", "twice_weight")
        check_numbers(self, *weights, "entropy_weight", "response_weight", "slots", "max_validation_examples", least=0)
        if (self.reward == "empathy") != bool(self.judges):
            raise ConfigError(f"judges = {self.judges} goes with reward = 'empathy', but reward = {self.reward!r}.")
        if self.reward == "empathy" and not self.intent_start:
            raise ConfigError("reward = 'empathy' needs intent_start = True: otherwise no reply depends on its intent.")
        if self.reason_tags != "marked" and not self.reasons:
            raise ConfigError(f"reason_tags = {self.reason_tags!r} needs reasons, the name of an annotator's stage.")
        if self.constant_second and (not self.second_intent or self.reward == "empathy"):
            raise ConfigError("constant_second = True needs second_intent = True and no reward of replies.")
        if self.actions == "table_1" and self.num_actions > 3:
            raise ConfigError(
                f"num_actions = {self.num_actions}, but Table 1 has three intents for each emotion; set it to at most "
                "3."
            )
        for setting, value, unread in _UNREAD:
            for name in unread if getattr(self, setting) == value else ():
                if getattr(self, name) != getattr(GeneratorTaskSettings, name):
                    raise ConfigError(
                        f"{name} = {getattr(self, name)!r} changes nothing where {setting} = {value!r}; leave it out."
                    )
        if not 1 <= self.state_time <= self.diffusion.steps:
            raise ConfigError(
                f"state_time = {self.state_time} must be a time of the schedule, from 1 to {self.diffusion.steps}."
            )

    @property
    def reinforced(self) -> bool:
        """Whether a policy learns from rewards."""
        return self.second_intent and not self.constant_second and self.policy_weight * self.twice_weight > 0
