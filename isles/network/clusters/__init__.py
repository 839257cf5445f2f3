"""Unequal nodes put together into clusters that each hold one copy of a model, cut to what its nodes can do (Ravnest,
Menon et al. 2024, arXiv 2401.01728). No torch.
"""
