"""What ranks say to each other: the backend, mesh axes, divergence, and collectives as linear maps."""
