"""How worker processes start, on this machine and on others, and how machines find each other. No tensor is known
here.
"""
