"""The paper's own figures (arXiv 2608.20530), to stand beside ours. Nothing here was measured by this project."""

TITLE = "the paper's, not measured here"

SPEEDUPS = {  # Table 1: average of nine benchmarks over plain decoding, one H100, concurrency 1; (8B, 4B)
    "DFlash": {0.0: (4.11, 4.02), 1.0: (3.28, 3.24)},
    "Domino": {0.0: (4.32, 4.09), 1.0: (3.36, 3.25)},
    "DSpark": {0.0: (4.37, 4.03), 1.0: (3.44, 3.26)},
    "DSpark, sampled": {1.0: (3.31, 2.93)},
    "LiLiCorr": {0.0: (4.51, 4.29), 1.0: (3.52, 3.43)},
}
TAU_GAIN = {0.0: (0.12, 0.19), 1.0: (0.09, 0.19)}  # Table 5: LiLiCorr's tau over DFlash's; at T = 1 the range of both
PENALTY_GAIN = (0.015, 0.032, 0.089)  # Table 11: what the distractor penalty adds to tau; least, average, most
EXACT_LOSS = (-0.0481, -0.0244, -0.0090)  # Table 12: exact walk against greedy, one checkpoint; worst, average, best
MARGIN = "within a few tenths of a percent of LiLiCorr without it (Table 15)"
SETTINGS = (  # Table 4
    "B 16, K 8, reranker width 1024, two layers, beta 7, lambda 1, gamma 0.25, margin share 0.5 and width 2; 64 "
    "sequences of 3,072 tokens a step with 512 anchors each, six epochs over about 1.4 million conversations, "
    "bfloat16, H100"
)
