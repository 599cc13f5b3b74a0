"""Steps of decodes, captured once for each batch size and replayed: one launch instead of hundreds."""
