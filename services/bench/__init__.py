"""Load generators for any OpenAI-compatible server. `python -m services.bench serve|latency|throughput`."""
