"""Benchmarks of one engine by itself, without gateways, tokenizers and coordinators."""
