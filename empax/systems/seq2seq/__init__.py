"""A source and its target, with nothing else: what fine-tunes a pretrained model on pairs of texts."""
