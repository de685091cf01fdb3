"""Which gradients travel together: one file per rule.

``groups(sizes_bytes, *, threshold_bytes, ready_s, seconds)`` returns the group of each tensor: integers that start at 0
and grow by 0 or 1, since tensors come in the order in which their gradients become ready and groups are contiguous.

sizes_bytes[i]: bytes of tensor i; threshold_bytes: the cap; ready_s[i]: when its gradient is ready (never decreases);
seconds(bytes): time of one collective, over an array. A rule uses what it needs.
"""
