"""What a step will take before it runs: rows with bytes and traffic, activations, memories that fit, and pictures."""
