"""Memories that are not the computing device's: the host's, and files on a disk; and how buffers get there and back."""
