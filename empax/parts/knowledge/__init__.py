"""Commonsense facts beside a context: where they come from (`sources`), and what models write (`generated`)."""
