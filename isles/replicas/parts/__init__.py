"""The six parts that outer methods are put together from, and what goes together."""
