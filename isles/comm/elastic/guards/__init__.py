"""What keeps strangers and bad members from doing harm: counts of refusals, rates, signs of life."""
