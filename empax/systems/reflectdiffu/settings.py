"""Settings of ReflectDiffu: what its stages share, and what each of them adds."""

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
    """What all stages share.

    Attributes:
      max_context_tokens: of a context as the generator reads it; the newest turns stay.
      max_piece_tokens: of a context as the annotator of reasons and the classifier of intents read it.
      max_target_tokens: of a response, end-of-sequence included.
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
                "copies; set them to 0 and 1 in config.reflectdiffu.decoding."
            )


@dataclasses.dataclass(frozen=True)
class ReasonTaskSettings:
    """The annotator of reasons.

    Attributes:
      data: where spans are from: "reccon" (people's, of DailyDialog), "sample" (people's, of the built-in corpus),
        "file" (yours), or "lexicon" (words of emotion by VADER, in the run's own contexts).
      spans: with "file", a folder with train.jsonl and validation.jsonl (`data.spans.read_spans`).
      least_valence: with "lexicon", see `data.spans.lexicon_spans`.
      max_validation_examples: 0 = all.
    """

    encoder: EncoderSettings = dataclasses.field(default_factory=EncoderSettings)
    data: Literal["reccon", "sample", "file", "lexicon"] = "reccon"
    spans: str = ""
    least_valence: float = 1.5
    max_validation_examples: int = 1000

    def __post_init__(self) -> None:
        check_numbers(self, "least_valence", least=0, most=4)
        check_numbers(self, "max_validation_examples", least=0)
        if (self.data == "file") != bool(self.spans):
            raise ConfigError(f"spans = {self.spans!r} goes with data = 'file', which is {self.data!r}.")


@dataclasses.dataclass(frozen=True)
class IntentTaskSettings:
    """The classifier of intents: of the context alone, since nobody has answered yet where it is asked."""

    encoder: EncoderSettings = dataclasses.field(default_factory=EncoderSettings)
    max_validation_examples: int = 1000

    def __post_init__(self) -> None:
        check_numbers(self, "max_validation_examples", least=0)


@dataclasses.dataclass(frozen=True)
class GeneratorTaskSettings:
    """Everything else, trained jointly (Eq. 12).

    Attributes:
      reasons: the stage that trained the annotator; empty = w/o ERA.
      reason_tags: which words the encoder is told are reasons: those that the annotator has "marked", "none", or as
        many others of the context, "shuffled". The last two are controls: the annotator's representations stay.
      intents: the stage that trained the classifier of intents; empty = every intent is as likely.
      experts: which expert judges (`model.Gate`); "none" = w/o C-Experts, one linear head and no
        contrastive loss.
      contrastive_weight: of NT-Xent beside the cross-entropy of emotions.
      temperature: of NT-Xent; ours, as the paper has none.
      classifier_share: alpha of Eq. 5; ours.
      first_intent: "mixed", or Eq. 5 as "printed".
      first_weight: of the cross-entropy of the listener's intent under the first intent; ours. 0 = the final one alone
        learns from labels (Eq. 10).
      final_prior: whether the logarithm of the classifier's distribution is added to the final intent's logits; ours.
      second_intent: False = w/o intent twice: the first intent is the final one.
      constant_second: whether the second intent is the same for all, every intent as likely: a control of what the
        policy adds to the layer that corrects.
      actions: the reference intents of an emotion: the commonest in training, or the paper's Table 1.
      num_actions: n, how many there are.
      policy_weight: of the policy's loss, which Eq. 10 and 12 lack; ours. 0 = they are right.
      reward: "alignment" (Eq. 9, of the chosen intent's embedding), "label", 1 for the intent that the response has, or
        "empathy", EmpRL's, of the reply to which the chosen intent leads.
      judges: of "empathy": the stages that trained the identifiers, together one for each mechanism.
      mimicry: False = w/o EMU: the decoder attends to the encoder's states.
      diffusion: betas and how many steps there are.
      state_time: how noisy the summary is from which emotions are restored; ours.
      restore: "ddim", or Eq. 7 as "printed", step by step.
      restore_steps: of "ddim"; 1 = the estimate of x_0.
      noise_error: whether the denoisers learn to predict the noise; Eq. 10 has only their KL.
      recognition: what the posterior of the denoisers' latent reads (`systems.reflectdiffu.model`).
      kl_weight: of the denoisers' KL, a sum over dimensions beside an error that is their mean: 2 / d_model is the
        weight of the likelihood's bound. Eq. 10 has 1.
      noise: deviation of what is added to the summary when answering, 1 in training; 0 = its mean, which no denoiser
        has seen. It depends on the instance's id.
      latent, hidden: of the denoisers; ours.
      copying: whether the decoder has a pointer.
      slots: different words of a context that the vocabulary lacks and the pointer can copy; the newest count, others
        are unknown.
      intent_start: whether the decoder starts from the final intent; ours, since Eq. 11 shows the decoder no intent.
      emotion_weight, twice_weight, response_weight: delta, zeta and eta of Eq. 12; ours, equal.
      max_validation_examples: 0 = all.
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
    reward: Literal["alignment", "label", "empathy"] = "alignment"
    judges: tuple[str, ...] = ()
    mimicry: bool = True
    diffusion: Schedule = dataclasses.field(default_factory=Schedule)
    state_time: int = 200
    restore: Literal["ddim", "printed"] = "ddim"
    restore_steps: int = 1
    noise_error: bool = True
    recognition: Recognition = "clean"
    kl_weight: float = 2 / 300
    noise: float = 1.0
    latent: int = 64
    hidden: int = 300
    copying: bool = True
    slots: int = 20
    intent_start: bool = True
    label_smoothing: float = 0.0
    emotion_weight: float = 1.0
    twice_weight: float = 1.0
    response_weight: float = 1.0
    max_validation_examples: int = 1000

    def __post_init__(self) -> None:
        check_numbers(self, "temperature", above=0)
        check_numbers(self, "classifier_share", least=0, most=1)
        check_numbers(self, "label_smoothing", least=0, below=1)
        check_numbers(self, "num_actions", least=2, most=len(INTENTS))
        check_numbers(self, "latent", "hidden", "restore_steps", least=1)
        weights = ("contrastive_weight", "first_weight", "policy_weight", "kl_weight", "emotion_weight", "twice_weight")
        check_numbers(self, *weights, "response_weight", "noise", "slots", "max_validation_examples", least=0)
        if (self.reward == "empathy") != bool(self.judges):
            raise ConfigError(f"judges = {self.judges} goes with reward = 'empathy', which is {self.reward!r}.")
        if self.reward != "alignment" and not self.reinforced:
            raise ConfigError(
                f"reward = {self.reward!r} teaches the second intent, which second_intent = {self.second_intent} and "
                f"policy_weight = {self.policy_weight} leave untaught; set True and a weight above 0, or reward = "
                "'alignment' with judges = ()."
            )
        if self.reward == "empathy" and not self.intent_start:
            raise ConfigError("reward = 'empathy' needs intent_start = True: else no reply depends on its intent.")
        if self.reason_tags != "marked" and not self.reasons:
            raise ConfigError(f"reason_tags = {self.reason_tags!r} needs reasons, the stage of an annotator.")
        if self.constant_second and (not self.second_intent or self.reward == "empathy"):
            raise ConfigError("constant_second = True needs second_intent = True and no reward of replies.")
        self.diffusion.check_time("state_time", self.state_time)
        if self.restore_steps > self.state_time:
            raise ConfigError(f"restore_steps = {self.restore_steps} must be at most state_time = {self.state_time}.")

    @property
    def splits_batches(self) -> bool:
        """Not with experts: NT-Xent compares the rows of a batch, and most of them may choose the expert."""
        return self.experts == "none"

    @property
    def reinforced(self) -> bool:
        """Whether a policy learns from rewards."""
        return self.second_intent and not self.constant_second and self.policy_weight > 0
