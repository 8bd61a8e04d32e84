"""The step as graphs: traced once for each signature, run as flat code."""
