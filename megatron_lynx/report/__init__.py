"""Draws a plan, simulation, comparison or run as one HTML file without scripts or a network."""
