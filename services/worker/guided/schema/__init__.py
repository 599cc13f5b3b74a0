"""JSON schemas as the grammar compiler takes them: what it would not enforce is rewritten or refused. Pure."""
