"""Files that the machines of a preparation share: results of tasks and shards, in a directory or in a bucket."""
