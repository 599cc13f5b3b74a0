"""How a lane of tests shares its work among processes of pytest-xdist."""
