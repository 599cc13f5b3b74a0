"""Endpoints of operators: they need the scope `admin`."""
