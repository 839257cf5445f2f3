"""Worlds whose workers serve stages: the peers of a swarm agree among themselves about who is in which step; a
lighthouse admits them, brings them together, and remembers.
"""
