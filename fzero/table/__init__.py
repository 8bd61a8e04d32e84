"""A step as pure data: policies, rules, rows, the layout that follows, and the `Spec` of them all."""
