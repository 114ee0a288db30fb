"""Parts that systems are built from."""
