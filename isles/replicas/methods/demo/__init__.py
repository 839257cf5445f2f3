"""DeMo: decoupled momentum (arXiv 2411.19870)."""
