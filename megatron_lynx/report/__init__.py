"""Draws a plan, simulation, comparison or run as one HTML file, zoomable from a step to a half, without a network.

    plan, job, folder, trace ... ──given──> inputs ──contents──> Island (JSON) ──page──> report.html
                                              └── rehearsed, planned for several budgets

The page's scripts and styles are in `assets/`. They compute nothing: every figure is in the island.
"""
