"""What Hugging Face's `generate` finds, as our searches give it."""

import numpy as np
import torch
from transformers import GenerationConfig


def found_by(model, inputs, mask, *, skip, num, new, eos, pad, **options):
    """Tokens [N, num, new], and scores of a beam: log-probabilities over lengths. `num` = 1 is greedy.

    `inputs` are prompts, or sources of an encoder. `skip` columns of what it gives stand before the response.
    `options` are those of the GenerationConfig.
    """
    config = GenerationConfig(
        num_beams=num, num_return_sequences=num, do_sample=False, pad_token_id=pad, eos_token_id=eos,
        return_dict_in_generate=True, output_scores=True, **options,
    )  # fmt: skip
    inputs, mask = (torch.tensor(np.asarray(array)).long() for array in (inputs, mask))
    out = model.generate(inputs, attention_mask=mask, generation_config=config)
    made = out.sequences[:, skip:].reshape(len(inputs), num, -1).numpy()
    tokens = np.full((len(inputs), num, new), pad)
    tokens[:, :, : made.shape[-1]] = made
    tokens[np.cumsum(tokens == eos, axis=-1) - (tokens == eos) > 0] = pad  # some models fill with the end token
    return tokens, out.sequences_scores.reshape(len(inputs), num).numpy() if num > 1 else None
