"""Which spare takes an open place: the one of least ``rank(node)`` that has the memory.

node.peer: its `simkit.spec.peers.Peer`; node.joined_s; node.draw: a number in [0, 1) of its own.
"""
