"""SMALLTALK LM: asynchronous mixture of language models (arXiv 2410.03529)."""
