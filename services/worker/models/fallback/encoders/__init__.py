"""Encoders without a decoder, by the modules of `transformers`."""
