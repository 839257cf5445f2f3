"""Tables of the planner, one a file."""
