"""The pipeline of `maxlm prepare`: scan, filter, tokenize, write shards, build the manifest."""
