"""Draws a plan, simulation, comparison or run as one HTML file without scripts or a network.

plan, job, folder, trace ... ──given──> inputs ──contents──> views, tables, points ──drawing, page──> report.html
                                          └── rehearsed, planned for several budgets
"""
