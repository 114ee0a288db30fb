"""Which judges of a work directory are found."""

from pathlib import Path

import pytest

from configs import empathy_identifiers
from empax.core.config import ConfigError
from empax.core.files import WorkDir
from empax.core.system import RunContext
from empax.core.types import MECHANISMS
from empax.pipeline import judging
from empax.pipeline.plan import make_plan, plain
from tests.plans import changed

FIRST, SECOND, THIRD = MECHANISMS
TRAINED = {"one": [FIRST], "two": [FIRST, SECOND], "three": [THIRD], "all": list(MECHANISMS)}


@pytest.mark.parametrize(
    ("stages", "found"),
    [("one all", "all"), ("one two three", "two three"), ("two all three", "all"), ("one two", "none")],
)
def test_the_fewest_judges_that_cover_all_are_found(stages, found, monkeypatch):
    config = plain(empathy_identifiers.get_config("tiny"))
    made = {name: config["identifiers"] | {"mechanisms": TRAINED[name]} for name in stages.split()}
    plan = make_plan(changed(config | made, {"run": list(made)}))
    run = RunContext(WorkDir(Path("nowhere")), plan, "evaluate")
    monkeypatch.setattr(judging, "_opened", lambda workdir: (run, ""))
    monkeypatch.setattr(judging, "_load_finished", lambda run, name: name)
    if found != "none":
        assert judging.find_judges(Path("nowhere")) == found.split()
        return
    with pytest.raises(ConfigError, match="it trains: identifiers one, two"):
        judging.find_judges(Path("nowhere"))
