"""The plan of memory of a configured run, and the run of the plan."""
