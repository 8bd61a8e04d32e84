"""Checkpoints: states as files that are whole or not there, read by any step over any ranks."""
