"""The objects that a unit's function reaches beside its arguments: they are found, filled, compared, put out or refused."""
