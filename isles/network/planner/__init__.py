"""What a run will cost: jobs, forms, ways, waits, and the search over them."""
