"""What the systems that answer have in common: the generator, its task, its stage, the answerer."""
