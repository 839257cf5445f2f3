"""The outer loop: snapshot, receive, encode and send, land. It knows no method.

`outer`             `OuterSync`: the loop that every method of parameter exchanges shares, and how workers join it
`fragment`          the part of the model that travels together, the cut, and its work in cached blocks
`round_exchange`    starts and ends exchanges, and survives losses: with a partner, all together or none, or a quorum
"""
