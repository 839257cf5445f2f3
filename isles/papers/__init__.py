"""The papers' calculations, as pure functions. `calculations` is the table that `isles plan explain` reads; the other
modules are named after a paper or its subject.
"""
