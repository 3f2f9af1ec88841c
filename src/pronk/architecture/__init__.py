"""Model configuration, and rotary position embedding (RoPE)."""
