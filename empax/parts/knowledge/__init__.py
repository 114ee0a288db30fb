"""Commonsense facts about a context: their sources (`sources`), and models that write them (`generated`)."""
