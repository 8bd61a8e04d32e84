"""Components that are no plain step: pipelines of stages, wherever each runs, and those on ranks of their own."""
