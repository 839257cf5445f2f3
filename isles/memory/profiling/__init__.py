"""What a profile is made with: what fake tensors do otherwise, and the methods that have the weights themselves."""
