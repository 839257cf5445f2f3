"""DiLoCoX (arXiv 2506.21263)."""
