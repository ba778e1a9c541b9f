"""Says what one layer and one link cost, measured on this machine or estimated from a cluster's figures: the profile of a job."""
