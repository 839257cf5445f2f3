"""What the search for a plan of memory (`isles.memory.search`) is made of."""
