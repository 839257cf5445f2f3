"""Engines move bytes and update parameters beside the computation. `base` has the interface for the executor."""
