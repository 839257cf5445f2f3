"""Who moves bytes and updates parameters beside the computation: `paced` threads (CPU), or nobody (`inline`)."""
