"""Runs a step's function: units as nodes that gather, free, recompute and reduce."""
