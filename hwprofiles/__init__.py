"""Hardware facts: one TOML per device, link and machine, and `sources.toml`, which says where each number is from.

The sub-folders hold data only; `simkit.spec.load` reads them.
"""
