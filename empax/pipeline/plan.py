"""`--mode=plan`."""
def describe(config): return ""
