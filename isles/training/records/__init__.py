"""What a run leaves: the run directory, checkpoints, metrics, logs."""
