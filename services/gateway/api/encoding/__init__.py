"""How large answers become JSON."""
