"""The packages of empax and, as empax.recipes and empax.weights, its recipes and weights; the rest: pyproject.toml."""

from setuptools import find_packages, setup

setup(packages=[*find_packages(include=["empax", "empax.*"]), "empax.recipes", "empax.weights"])
