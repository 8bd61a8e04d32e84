"""How params change: the update of a whole step, and the one inside its pullback."""
