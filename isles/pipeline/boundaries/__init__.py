"""What crosses between two stages, one form a file."""
