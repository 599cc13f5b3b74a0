"""What `config.json` says of models whose layers have states."""
