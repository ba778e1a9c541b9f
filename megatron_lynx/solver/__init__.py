"""Choosing what is kept and what is replayed, and where: a problem in, an answer out."""
