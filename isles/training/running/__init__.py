"""Starting a run: one machine, several, torchrun; and what follows it."""
