"""Mixture-of-experts layers: router, dispatch of tokens to experts, and the experts' matrix products."""
