"""`isles swarm`, and what of other commands is about swarms."""
