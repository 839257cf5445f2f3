"""Ravnest (Menon et al. 2024, arXiv 2401.01728): clusters that each hold a copy of the model in asynchronous stages,
and average with each other from time to time, though they are cut at different blocks.
"""
