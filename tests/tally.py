"""A file of the user's whose variables are named only where it is imported, inside a function."""

calls = 0
