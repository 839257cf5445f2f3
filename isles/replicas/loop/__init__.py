"""The outer loop: snapshot, receive, encode and send, land. It knows no method.

`outer`           `OuterSync`: the loop of every method that exchanges parameters; `config`: settings that they share
`fragment`        the part of the model that travels together, and the cut into fragments
`sweep`           a round's work on memory, in blocks that fit a cache
`round_exchange`  a round's exchanges, in pairs or with all, and what becomes of them where workers are lost
`quorum`          rounds that do not wait for the slowest; chooses the class of exchanges that a method gets
"""
