"""Keeps services working while others fail: backoff, circuit breakers, sequence numbers, attempt fences. No clock.

Queues between coroutines are bounded by `asyncio.Queue(maxsize)`, which needs no wrapper of ours.
"""
