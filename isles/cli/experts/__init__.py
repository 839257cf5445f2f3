"""`isles experts`: ensembles of models that are trained apart."""
