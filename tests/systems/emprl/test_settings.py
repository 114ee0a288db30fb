"""What of EmpRL's settings cannot be."""

import pytest

from empax.core.config import ConfigError
from empax.decoding.settings import DecodeSettings
from empax.systems.emprl.settings import (
    GrpoTaskSettings,
    KlSettings,
    PolicyTaskSettings,
    PpoTaskSettings,
    PreferenceTaskSettings,
    RewardSettings,
)

SHIFTS = {"rewards": (RewardSettings(shift_penalty=1.0),)}
FOCUS = {"likelihood_weight": 0.2, "likelihood_focus": 1.0}
OWN = RewardSettings("text", function="a:b")


@pytest.mark.parametrize(
    ("settings", "changes", "message"),
    [
        (RewardSettings, {"kind": "text"}, "need 'module:name'"),
        (RewardSettings, {"kind": "text", "function": "a:b", "shift_penalty": 1.0}, "goes with kind = 'empathy'"),
        (RewardSettings, {"kind": "text", "function": "a:b", "goal": "f1"}, "goal goes with kind = 'empathy'"),
        (
            RewardSettings,
            {"kind": "novelty", "stages": ("any",)},
            "stages goes with kind = 'empathy', not with 'novelty'",
        ),
        (RewardSettings, {"goal": "f1", "shift_penalty": 1.0}, "shift_penalty = 1.0 goes with goal = 'gold'"),
        (RewardSettings, {"goal": "balanced", "shift_penalty": 1.0}, "goes with goal = 'gold', not with 'balanced'"),
        (RewardSettings, {"shift_penalty": -1.0}, "shift_penalty = -1.0 must be at least 0"),
        (RewardSettings, {"stages": ()}, r"stages = \(\); name the stages"),
        (KlSettings, {"coefficient": -1.0}, "at least 0"),
        (KlSettings, {"target": 0.0}, "above 0"),
        (PolicyTaskSettings, {"kept_share": 0.0}, r"lie in \(0, 1\]"),
        (PolicyTaskSettings, SHIFTS, "needs whole_dialogues"),
        (PolicyTaskSettings, {"max_turns": 4}, "max_turns = 4 needs whole_dialogues"),
        (PolicyTaskSettings, {"likelihood_focus": 1.0}, "likelihood_focus = 1.0 needs a likelihood_weight"),
        (PolicyTaskSettings, {**FOCUS}, "likelihood_focus = 1.0 needs a reward of kind 'empathy' with goal 'f1'"),
        (PolicyTaskSettings, {**FOCUS, "rewards": (OWN,)}, "all gold responses have the same merit"),
        (PolicyTaskSettings, {"whole_dialogues": True, "index": "index"}, "do not go together"),
        (PolicyTaskSettings, {"rewards": (RewardSettings(),) * 2}, "two parts of kind = 'empathy'"),
        (PpoTaskSettings, {"rollout": DecodeSettings("greedy")}, "must be 'sample'"),
        (PpoTaskSettings, {"rollout": DecodeSettings("sample", num_samples=2)}, "groups are GRPO's"),
        (PpoTaskSettings, {"rollout": DecodeSettings("sample", end_at_limit=True)}, "limit = True must be False"),
        (PpoTaskSettings, {"lam": 1.5}, r"lie in \[0, 1\]"),
        (PpoTaskSettings, {"value_clip": 0.0}, "None switches clipping off"),
        (GrpoTaskSettings, {"rollout": DecodeSettings("sample")}, "at least 2: a group"),
        (GrpoTaskSettings, {**SHIFTS, "whole_dialogues": True}, "goes with PPO alone"),
        (
            GrpoTaskSettings,
            {"rollout": DecodeSettings("sample", num_samples=4, more_eos_ids=(5,))},
            r"more_eos_ids = \(5,\) must be empty",
        ),
        (
            GrpoTaskSettings,
            {"rollout": DecodeSettings("sample", num_samples=4, rerank="consensus")},
            "rollout.rerank = 'consensus' must be empty: a policy learns from all answers of a group",
        ),
        (PreferenceTaskSettings, {"rollout": DecodeSettings("sample")}, "num_samples = 1 must be at least 2"),
        (PreferenceTaskSettings, {"loss": "kto", "pairs": "f"}, "pairs and loss = 'kto' do not go together"),
        (PreferenceTaskSettings, {"index": "reindex", "pairs": "f"}, "pairs and index = 'reindex' do not go together"),
        (PreferenceTaskSettings, {"whole_dialogues": True, "pairs": "f"}, "pairs and dialogues do not go together"),
        (PreferenceTaskSettings, {"rewards": (OWN,), "pairs": "f"}, "but those of pairs = 'f' come from a file"),
        (PreferenceTaskSettings, {**SHIFTS, "whole_dialogues": True}, "shift_penalty goes with PPO"),
        (PreferenceTaskSettings, {"beta": 0.0}, "beta = 0.0 must be"),
        (PreferenceTaskSettings, {"rewards": ()}, "all responses alike, so that none is preferred and nothing"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings, changes, message):
    with pytest.raises(ConfigError, match=message):
        settings(**changes)


def test_a_focus_goes_with_a_goal_by_which_merits_differ():
    for goal in ("f1", "balanced"):
        PolicyTaskSettings(**FOCUS, rewards=(OWN, RewardSettings(goal=goal)))
