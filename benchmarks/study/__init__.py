"""The study: every method on the demo target at equal budget, from training to tables and plots, in one command."""
