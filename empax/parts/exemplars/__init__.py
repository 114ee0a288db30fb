"""What the systems that retrieve exemplars have in common: encoder, examples with exemplars, search."""
