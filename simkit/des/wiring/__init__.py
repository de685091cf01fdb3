"""How peers are wired into pipelines: a file is a wiring, its name the key, its class ``Wiring`` (see `_common`)."""
