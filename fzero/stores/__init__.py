"""Buffers of training state that lie elsewhere than in memory: in files on a local disk."""
