"""HDEE: heterogeneous domain expert ensemble."""
