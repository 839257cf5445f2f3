"""What a profile is made with: numbers that models ask for, and the methods that have the weights themselves."""
