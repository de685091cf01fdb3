"""Discrete-event simulation: what happens in time when it is dynamic, and the check of every closed form."""

from __future__ import annotations
