"""An indexer that chooses blocks of keys for each key/value head: its weights, where its keys lie, and attention."""
