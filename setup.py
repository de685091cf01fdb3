"""Finds the packages; the rest stands in pyproject.toml, whose own discovery does not see through package-dir."""

from setuptools import find_packages, setup

setup(packages=[*find_packages(include=["simkit", "simkit.*"]), "simkit.hwprofiles", "simkit.validation"])
