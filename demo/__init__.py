"""The demo that ships: a small target, its corpus, and everything needed to try the whole method on a laptop."""
