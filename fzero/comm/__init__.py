"""Communication between ranks: the backend, mesh axes, divergence, and collectives as linear maps."""
