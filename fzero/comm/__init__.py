"""Communication between ranks: the backend, mesh axes, divergence, linear maps, and ranks that threads play."""
