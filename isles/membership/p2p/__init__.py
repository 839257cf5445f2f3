"""Tensors between workers: over connections of their own, encrypted from end to end.

`transport`   the `Transport` of an elastic world, and all messages to one peer
`inbox`       messages that have arrived, and posted receives
`stream`      one TLS 1.3 connection, on which one of a pair sends and the other one acknowledges
`pairs`       which worker dials: directly, if the lighthouse knows that one is reachable (`AddressBook`); else both
dial
              the lighthouse or a worker that relays for them (`relay`)
"""
