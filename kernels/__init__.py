"""Real torch operators: what simkit models, to import and to measure. Needs the extra `kernels` (torch, safetensors)."""
