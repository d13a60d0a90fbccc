"""Serving and measuring: engine, scheduler, benchmark, server. It never imports `train`."""
