"""Estimates the cost of a recipe before it runs: parameters, memory, traffic, time, on TPU slices too."""
