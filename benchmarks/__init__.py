"""Side-by-side measurements against what a user would pick instead: `python -m benchmarks.NAME --help`."""

import os

# What is compared with runs on the CPU; an accelerator on one side alone would be no comparison.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
