"""Multi-latent attention: tokens are compressed, and heads are made of that."""
