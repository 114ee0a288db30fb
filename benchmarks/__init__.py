"""Side-by-side benchmarks against the libraries that users would choose instead: `python -m benchmarks.NAME --help`."""
