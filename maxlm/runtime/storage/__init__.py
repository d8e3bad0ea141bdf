"""What a run has, in a bucket: uploaded in the background, fetched by whoever goes on elsewhere."""
