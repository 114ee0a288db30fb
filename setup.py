"""The packages of empax and, as empax.recipes, its recipes; everything else is in pyproject.toml."""

from setuptools import find_packages, setup

setup(packages=[*find_packages(include=["empax", "empax.*"]), "empax.recipes"])
