"""Loops: what fz.loop tells its ranks, its user and its files."""
