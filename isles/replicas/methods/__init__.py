"""The methods, each in a file (or a folder) of its paper's name."""
