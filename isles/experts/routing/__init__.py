"""Which expert a text goes to."""
