"""A tiered prompt (KV) cache for MLX."""
