"""LiLiCorr in JAX: the method as pure functions. No flags, clocks, logging or process state."""
