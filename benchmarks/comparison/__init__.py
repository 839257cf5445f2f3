"""The great comparison: every method on one job, and a few of them on models of several sizes.

cases (what is run) -> runs (folders, each run once) -> figures (numbers by row) -> claims, page, pictures
"""
