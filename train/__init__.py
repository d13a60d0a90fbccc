"""Training: flags, data, steps, checkpoints and export. It never imports `serve`."""
