"""The six parts that outer methods are put together from: `interfaces`, and `choices` of them. `legal`: what goes
together. `quadratic`: rates that converge.
"""
