"""What the systems that answer have in common: models, generator task, examples, responder."""
