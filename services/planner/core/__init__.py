"""What the planner decides from reports: no bus, no clock, no asyncio."""
