"""What was asked, as pure data: policies, rules, rows, the layout that follows, and the `Spec` of a step."""
