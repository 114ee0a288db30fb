"""Side-by-side benchmarks against the libraries that users would choose instead: `python -m benchmarks.NAME --help`."""

import os

# The baselines run on the CPU; an accelerator on one side alone would make the comparison unfair.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
