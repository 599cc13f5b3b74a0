"""The planner: how many engines meet the latency targets of the load that is coming, and who is started or drained."""
