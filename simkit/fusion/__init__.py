"""How gradients are merged into buffers: one file per rule."""
