"""Components made of components: pipelines of stages, wherever each stage runs."""
