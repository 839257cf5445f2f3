"""A method put together from parts: any choice of Isles' own, or of yours."""
