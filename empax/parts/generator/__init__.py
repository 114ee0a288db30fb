"""Parts of the systems that answer: the generator, its task, its stage, the answerer."""
