"""What one observer of torch's operations sees in a function's first run, and the rules that look at it."""
