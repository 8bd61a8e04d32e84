"""One pass over memory: formulas and formats as generated C++, compiled, or run by torch."""
