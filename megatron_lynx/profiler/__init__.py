"""Costs of one layer and one link, measured on this machine or estimated from a cluster's figures: the profile of a job."""
