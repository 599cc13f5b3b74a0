"""Tests of services/bench/hops."""
