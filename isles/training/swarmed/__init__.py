"""Runs whose stages are served by a swarm of peers."""
