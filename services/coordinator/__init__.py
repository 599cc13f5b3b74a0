"""Places each request on the engine with the least work, and answers operators. `python -m services.coordinator`."""
