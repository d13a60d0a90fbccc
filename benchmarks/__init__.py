"""Measurements of this project beside others', one command each; nothing of the project imports them."""
