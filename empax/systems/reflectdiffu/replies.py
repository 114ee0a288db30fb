"""EmpRL's reward for ReflectDiffu's policy: the empathy of the reply to which a second intent leads."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float, Int

from empax.core.config import ConfigError
from empax.core.protocols import Tokenizer
from empax.core.system import RunContext
from empax.core.types import Instance
from empax.parts.attributes import IdentifierJudge, judge_stage, load_judge
from empax.parts.attributes.identifier import check_mechanisms


def check_reply_judges(stages: Sequence[str], run: RunContext) -> None:
    """Raises ConfigError unless `stages` come earlier and train identifiers of all mechanisms."""
    for name in stages:
        run.earlier("judges", name, tasks=("attributes.identifier",))
    check_mechanisms([mechanism for name in stages for mechanism in judge_stage(run, name).mechanisms])


def load_reply_judges(stages: Sequence[str], run: RunContext) -> tuple[IdentifierJudge, ...]:
    """The identifiers of finished stages."""
    judges = tuple(load_judge(run, name) for name in stages)
    if not all(isinstance(judge, IdentifierJudge) for judge in judges):
        raise ConfigError(f"config.{run.stage}.judges = {stages} must train 'attributes.identifier'.")
    return judges  # type: ignore[return-value]


@dataclasses.dataclass(frozen=True)
class ReplyEmpathy:
    r"""How likely a reply has the levels of empathy that the gold response has, in (0, 1].

    .. math:: R = \exp(-\sum_m CE(p_m, l_m))

    with l the identifiers' own levels of the gold response. Source: EmpRL, Eq. 2 to 5.

    Attributes:
      judges: together one for each mechanism.
      tokenizer: of the replies.
      instances: N, which rows of batches count.
      words: of each instance, what slots stand for.
    """

    judges: tuple[IdentifierJudge, ...]
    tokenizer: Tokenizer
    instances: Sequence[Instance]
    words: Sequence[Sequence[str]]
    _levels: dict[int, Int[np.ndarray, " M"]] = dataclasses.field(default_factory=dict, compare=False)

    def __call__(self, rows: Int[np.ndarray, " B"], replies: Int[np.ndarray, "B T"]) -> Float[np.ndarray, " B"]:
        """The rewards of replies to the instances `rows`; 0 for -1."""
        real = [int(i) for i in rows if i >= 0]
        self._judge_gold([i for i in dict.fromkeys(real) if i not in self._levels])
        ids = replies[np.asarray(rows) >= 0].tolist()
        texts = [self.tokenizer.decode(reply, self.words[i]).strip() for i, reply in zip(real, ids, strict=True)]
        found = self._log_probs(real, texts)
        wanted = np.array([self._levels[i] for i in real], int).reshape(len(real), found.shape[1], 1)
        rewards = np.zeros(len(rows), np.float32)
        rewards[np.asarray(rows) >= 0] = np.exp(np.take_along_axis(found, wanted, axis=2).sum(axis=(1, 2)))
        return rewards

    def _judge_gold(self, rows: Sequence[int]) -> None:
        levels = self._log_probs(rows, [self.instances[i].response for i in rows]).argmax(axis=2)
        self._levels.update(zip(rows, levels, strict=True))

    def _log_probs(self, rows: Sequence[int], texts: Sequence[str]) -> Float[np.ndarray, "B M 3"]:
        contexts = [self.instances[i].context for i in rows]
        return np.concatenate([judge(contexts, texts, progress=False) for judge in self.judges], axis=1)
