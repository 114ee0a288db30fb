# %% [markdown]
# # A T5 with adapters, and back to Hugging Face
#
# Load a pretrained T5, train low-rank adapters on pairs of texts, compare replies, and write a folder that Transformers
# and PEFT read.

# %%
# Where empax is missing, as in Colab: installs it from a wheel beside this notebook, or from its repository. JAX stays.
import importlib.util
import subprocess
import sys
from importlib import metadata
from pathlib import Path

REPOSITORY = ""  # "https://github.com/OWNER/NAME"
WEIGHTS = ("traceforge-title-model==0.2.0",)

if importlib.util.find_spec("empax") is None:
    source = next(map(str, Path().glob("empax-*.whl")), REPOSITORY and f"git+{REPOSITORY}")
    if not source:
        raise SystemExit("Put a wheel of empax beside this notebook, or its repository's address into REPOSITORY.")
    held = [name for name in ("jax", "jaxlib", "numpy") if importlib.util.find_spec(name)]
    Path("held.txt").write_text("\n".join(f"{name}=={metadata.version(name)}" for name in held))
    pip = [sys.executable, "-m", "pip", "install", "--quiet"]
    subprocess.run([*pip, "--constraint", "held.txt", source], check=True)
    if WEIGHTS:
        subprocess.run([*pip, "--no-deps", *WEIGHTS], check=True)  # their dependencies would bring PyTorch

# %%
import jax

import empax

print(jax.devices())

# %% [markdown]
# Any T5, BART or Llama works: a local folder, a name on the Hub, a GGUF file. This one comes in a wheel, in a form that
# Transformers does not load. So it is first saved as `base` in the form of Transformers, which PEFT needs.

# %%
import shutil

MODEL = "flan-t5-small-titles"
FOLDER = Path("runs/lora_t5")
shutil.rmtree(FOLDER, ignore_errors=True)  # of an earlier time: `save` overwrites nothing
empax.load(MODEL).save(FOLDER / "base")
model = empax.load(FOLDER / "base")
model

# %%
QUESTIONS = ["I passed my exam after three tries!", "My dog died last night."]
model.generate(QUESTIONS, max_tokens=24)

# %% [markdown]
# The corpus that comes with empax has 256 dialogues. A pair is a message and the reply of a listener.

# %%
from empax.data.dialogues import to_instances
from empax.data.sample import load_dialogues

splits = {
    name: [(instance.context[-1], instance.response) for instance in to_instances(dialogues)]
    for name, dialogues in load_dialogues().items()
}
print(len(splits["train"]), splits["train"][0])

# %%
EPOCHS = 1
before = model.nll(*zip(*splits["validation"], strict=True)).perplexity
tuned = model.finetune(splits["train"], validation=splits["validation"], lora=16, epochs=EPOCHS, learning_rate=1e-3)
after = tuned.nll(*zip(*splits["validation"], strict=True)).perplexity
print(f"perplexity on validation: {before:.1f}, then {after:.1f}")

# %%
for question, answer in zip(QUESTIONS, tuned.generate(QUESTIONS, method="beam", max_tokens=24), strict=True):
    print(question, "->", answer)

# %% [markdown]
# Transformers loads `merged` like any T5. PEFT loads `adapters`, on top of the model that they name.

# %%
tuned.save(FOLDER / "merged")
tuned.save(FOLDER / "adapters", format="peft")
