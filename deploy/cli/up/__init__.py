"""`baton up`: from the options that were typed to a running stack."""
