"""How values are stored: formats over a few operations, encoded and decoded by torch."""
