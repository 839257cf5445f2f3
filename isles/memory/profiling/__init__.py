"""Corrections that `isles.memory.profile` needs."""
