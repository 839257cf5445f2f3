"""SMALLTALK LM: asynchronous mixture of language models."""
