"""Several runs under one command: `isles compare`, `isles simulate`, `isles tune`."""
