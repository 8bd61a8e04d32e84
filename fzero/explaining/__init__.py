"""What `fz.explain` sees: the values of one run, operation by operation, and where those begin that are not finite."""
