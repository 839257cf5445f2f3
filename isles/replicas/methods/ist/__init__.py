"""Independent subnet training (arXiv 1910.02120)."""
