"""empax: empathetic dialogue in JAX, from retrieval to report."""

__version__ = "0.1.0"
