"""Several workers that are one replica."""
