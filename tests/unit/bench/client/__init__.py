"""Tests of services/bench/client."""
