"""What a broker decides: which spare takes a place, where it gets its state from, how many spares to keep, and when a
slow peer is given up. Each folder is one decision, each file in it one policy."""
