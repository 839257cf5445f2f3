"""Tensors between workers: over connections of their own, encrypted from end to end.

`transport`   the `Transport` of an elastic world, and all messages to one peer
`inbox`       messages that have arrived, and receives that wait
`stream`      one TLS 1.3 connection, on which one of a pair sends and the other one acknowledges
`pairs`       who of two workers dials whom: directly, where the lighthouse knows that one is reached (`AddressBook`),
              else both dial the lighthouse or a worker that relays for them (`relay`)

Which members exchange in a round is decided in `isles.membership.member` and `isles.replicas.parts.choices`.
"""
