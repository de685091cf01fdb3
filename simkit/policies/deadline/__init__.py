"""When a slow peer is given up: ``limit_s(times)``, the longest a stage may take for one micro-batch.

times: what the peers of the unit take at present, in seconds.
"""
