"""The demonstration: a small Qwen3-shaped chat model of our own, the corpus it learned and the replies it gives."""
