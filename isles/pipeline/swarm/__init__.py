"""SWARM: stages served by peers that come and go; every microbatch chooses its next peer as it travels."""
