"""HDEE: heterogeneous domain expert ensemble (arXiv 2502.19385)."""
