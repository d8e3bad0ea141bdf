"""Complete examples that use maxlm."""
