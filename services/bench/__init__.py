"""Benchmarks: load generators for any OpenAI-compatible server, and measurements of single parts of this one."""
