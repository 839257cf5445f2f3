"""The outer loop: snapshot, receive, encode and send, land. It knows no method.

`outer`        `OuterSync`: the loop that every method of parameter exchanges shares; `config`: settings they share
`fragment`     the part of the model that travels together; `fragments`: the cut; `sweep`: its work in cached blocks
`round_exchange`      starts and ends exchanges, and survives losses; `quorum` also says which one a method has
`agreed`       rounds that all members land together or none; `quorum`: without waiting for the slowest
`joining`      taking part in rounds that others have begun
`weights`      how much each worker counts
`foretold`     what a method says of a run before it runs
"""
