"""State between steps: sharded trees, the training state, how it is made, checked, gathered and measured."""
