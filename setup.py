"""Finds the packages; the rest stands in pyproject.toml, whose own discovery does not see through package-dir."""

from setuptools import find_packages, setup

kernels = ["simkit.kernels", *(f"simkit.kernels.{name}" for name in find_packages("kernels"))]
setup(packages=[*find_packages(include=["simkit", "simkit.*"]), "simkit.hwprofiles", "simkit.validation", *kernels])
