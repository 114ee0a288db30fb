"""Parts of the systems that retrieve exemplars: encoder, examples with exemplars, search."""
