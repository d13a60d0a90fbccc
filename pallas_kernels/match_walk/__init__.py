"""Matching scores between adjacent slots, and the walks through them."""

from pallas_kernels.match_walk.reference import Scores, exact_walk, greedy_walk, match_scores, sampled_walk

__all__ = ["Scores", "exact_walk", "greedy_walk", "match_scores", "sampled_walk"]
