"""A component on ranks of its own: handles of values here, and there the ranks that make, keep and send them.

A call is a message to every rank. `component` and `handle` are what a caller has; `host`, `verbs` and `values` run on
the ranks; `pull` brings values from rank to rank; `threads`, `processes` and `on_ray` start ranks.
"""
