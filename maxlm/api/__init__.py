"""Python API: configs, data sets, plans, runs and models. `import maxlm` provides its names."""
