"""One file a command; its docstring's first line is the summary of `simkit --help`.

A command has ``configure(parser)``, which adds its flags, and ``run(args) -> int``, which returns the exit code and
imports what it needs.
"""
