"""Models with an encoder and heads: the task, its stages, and the predictor."""
