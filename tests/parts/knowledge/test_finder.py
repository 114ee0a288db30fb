"""Facts that are found when somebody talks."""

import dataclasses

import pytest

from empax.core.types import Instance
from empax.data.knowledge import Fact
from empax.parts.knowledge.finder import with_facts


def test_conversations_that_share_an_id_have_their_own_facts():
    one = Instance("chat#1", ("My dog died.",), "", "")
    known = dataclasses.replace(one, context=("It rains.",), notes={"facts": [{"words": "wet"}]})
    other = dataclasses.replace(one, context=("I got a job.",))

    def finder(instances, split):
        assert split == ""
        return [[Fact(i.context[-1], "xReact", f"of {i.context[-1]}")] for i in instances], 0

    found = with_facts(lambda: finder, [one, known, other])
    assert [i.notes["facts"][0].get("tail", "known") for i in found] == ["of My dog died.", "known", "of I got a job."]
    assert with_facts(lambda: None, [one]) == [one]
    assert with_facts(lambda: pytest.fail("nothing is new"), [known]) == [known]
