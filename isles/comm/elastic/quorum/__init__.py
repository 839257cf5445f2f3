"""Rounds for whose mean a quorum is enough."""
