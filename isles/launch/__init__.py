"""How worker processes start, on this machine and on others, and how machines find each other. This package handles no
tensors.
"""
