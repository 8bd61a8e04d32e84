"""Components that are no plain step: those whose ranks lie elsewhere. They have a step's verbs."""
