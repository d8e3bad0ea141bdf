"""Python API: trained models as objects. `import maxlm` provides its names."""
