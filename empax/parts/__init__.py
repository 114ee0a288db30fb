"""What systems are made of."""
