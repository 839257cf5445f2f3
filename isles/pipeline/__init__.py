"""How one copy of the model is cut in depth, and which way each microbatch goes through the stages."""
