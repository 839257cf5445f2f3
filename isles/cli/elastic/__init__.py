"""The commands of runs whose workers come and go."""
