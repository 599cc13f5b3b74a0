"""Tests of services/bench/prefixes."""
