"""Prepared data sets: manifest, token shards, and the local cache of shards in a bucket."""
