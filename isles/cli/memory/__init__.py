"""Commands of memory: plans, and what this machine can do."""
