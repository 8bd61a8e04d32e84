"""The objects that a unit's function reaches beside its arguments: found, filled, compared, put out, refused."""
