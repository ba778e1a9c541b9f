"""Draws what was planned, simulated, compared or run as one HTML file that zooms from a step to a half and needs no network.

    plan, job, folder, trace ... ──given──> what there is ──contents──> Island (JSON) ──page──> report.html
                                              └── rehearsed, planned for several budgets      └── draws it, decides nothing

The page's scripts and styles are in `assets/`; everything that they show is a figure of the island.
"""
