"""Decoders of `transformers` whose tokens attend to images beside their prompt."""
