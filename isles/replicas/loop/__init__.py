"""The outer loop: snapshot, receive, encode and send, land. It knows no method.

`outer`             `OuterSync`: the loop of every method that exchanges parameters, and how workers join it
`fragment`          the part of the model that travels together, the cut into fragments, and its work in cached blocks
`round_exchange`    a round's exchanges, and what becomes of them where workers are lost: in pairs or groups, all
                    members together or none, or a quorum
"""
